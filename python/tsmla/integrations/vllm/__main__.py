"""python -m tsmla.integrations.vllm: which vLLM is there, whether the plug-in fits it, and the flags to use.

Exit status: 0 when it fits, 1 when it does not, 2 without vLLM.
"""

from __future__ import annotations

import json
import os
import sys

from tsmla.integrations.shared import fit

from . import CUSTOM, contract, options, register, selected_names


def main() -> int:
    if status := fit.reported("vLLM", "0.26 to 0.33", contract, "vllm.general_plugins", "VLLM_PLUGINS", "the backends"):
        return status
    register()
    decode, prefill = selected_names()
    chosen = {"backend": decode, "mla_prefill_backend": prefill}
    print(f"flags: vllm serve MODEL --attention-config '{json.dumps(chosen)}'")
    print(f"  LLM(model=..., attention_config={chosen})")
    sparse, _ = selected_names(sparse=True)
    unless_named = f", and {options.SPARSE.name}=1 in the environment" if sparse == CUSTOM else ""
    print(f"  layers that choose their keys (sparse attention): {sparse} as the backend{unless_named}")
    print("  --kv-cache-dtype fp8 for a cache in e4m3, fp8_ds_mla for one in e4m3 with scales in its rows")
    print("  docs/start/vllm.md says what is supported")
    for setting in options.SETTINGS:
        value = os.environ.get(setting.name) or f"unset: {setting.default}"
        print(f"  {setting.name} ({setting.accepted}; {value}): {setting.meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
