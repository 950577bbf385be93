"""`fourhop up`: every tier on this machine, engines as processes, frontend and router joined in this one."""
