"""python -m tsmla.integrations.sglang: which SGLang is there, whether the plug-in fits it, and the flags to use.

Exit status: 0 when it fits, 1 when it does not, 2 without SGLang.
"""

from __future__ import annotations

import sys

from tsmla.integrations.shared import fit

from . import NAME, PAGE, contract


def main() -> int:
    if status := fit.reported(
        "SGLang", ", ".join(contract.KNOWN), contract, "sglang.srt.plugins", "SGLANG_PLUGINS", "the backend"
    ):
        return status
    print(f"flags: --attention-backend {NAME} --page-size {PAGE} --cuda-graph-backend-prefill disabled")
    print("  --kv-cache-dtype fp8_e4m3 for a cache in e4m3; docs/start/sglang.md says what is supported")
    print(
        "On a GPU, the plug-in has run with 0.5.17 only, without drafts and on one GPU; docs/start/sglang.md says more."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
