"""A certificate for 127.0.0.1 that signs itself, good until 2126, its key, and a certificate of somebody else.

They prove nothing to anybody but the tests. Made with `openssl req -x509 -newkey ec -nodes -days 36500`.
"""

from pathlib import Path

CERTIFICATE = Path(__file__).parent / "certificate.pem"
KEY = Path(__file__).parent / "key.pem"
OTHER = Path(__file__).parent / "other.pem"
