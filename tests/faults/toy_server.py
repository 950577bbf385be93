"""A program: an engine over the toy model, as its own process.

    python toy_server.py CONNECTOR PORT KV_PORT

Says "ready" when it listens. A step takes STEP_S, so that a request lasts long enough to be interrupted.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

STEP_S = 0.003


async def main(connector: str, port: int, kv_port: int) -> None:
    from fakes.engines import toy_engine
    from fourhop.engine.app import create
    from fourhop.engine.sampled import Computed
    from fourhop.engine.step import Work
    from fourhop.engine.toy import ToyRunner
    from fourhop.kv.config import ConnectorOptions, KVTransferConfig
    from fourhop.service import ServerConfig
    from fourhop.service.run import serve

    class SlowRunner(ToyRunner):
        def run(self, work: list[Work]) -> Computed:
            time.sleep(STEP_S)
            return super().run(work)

    options = ConnectorOptions(port=kv_port, pull_timeout_s=1.0, kv_lease_duration=2.0)
    transfer = KVTransferConfig(connector, kv_connector_extra_config=options)
    async with toy_engine(transfer=transfer, runner=SlowRunner) as engine:
        config = ServerConfig(port=port)
        await serve(create(engine, config), config, started=lambda: print("ready", flush=True))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
