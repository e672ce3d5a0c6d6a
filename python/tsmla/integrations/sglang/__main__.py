"""python -m tsmla.integrations.sglang: which SGLang is there, whether the plug-in fits it, and the flags to use.

Exit status: 0 when it fits, 1 when it does not, 2 without SGLang.
"""

from __future__ import annotations

import sys

from tsmla.integrations.shared import entry_points

from . import NAME, PAGE, contract

_GROUP = "sglang.srt.plugins"


def main() -> int:
    version = contract.version()
    if version is None:
        print(f"SGLang is not installed in this environment; the plug-in is for SGLang {', '.join(contract.KNOWN)}")
        return 2
    read = "one of the versions" if version in contract.KNOWN else "not one of those"
    print(f"SGLang {version} ({read} that the plug-in was tested with: {', '.join(contract.KNOWN)})")
    print(f"entry point: {entry_points.found(_GROUP, 'SGLANG_PLUGINS')}")
    complaints = contract.broken()
    for complaint in complaints:
        print(f"  does not fit: {complaint}")
    if complaints:
        print("This SGLang has moved on. Do not select the backend; please report the lines above.")
        return 1
    print("contract: fits")
    print(f"flags: --attention-backend {NAME} --page-size {PAGE} --cuda-graph-backend-prefill disabled")
    print("  --kv-cache-dtype fp8_e4m3 for a cache in e4m3; docs/start/sglang.md says what is supported")
    print("The plug-in has not been run in a real SGLang on a GPU yet.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
