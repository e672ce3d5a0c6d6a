"""MLA (Multi-head Latent Attention) GPU kernels that are already compiled.

Importing this costs nothing: torch, TVM-FFI and the compiler are imported when a name that needs them is first used.
"""

import importlib

_MODULE_OF = {
    "Arch": "variant",
    "ArgumentError": "errors",
    "DecodeVariant": "variant",
    "Dtype": "variant",
    "KernelUnavailable": "errors",
    "LibraryError": "errors",
    "ManifestError": "errors",
    "PackVariant": "variant",
    "PrefillVariant": "variant",
    "QuantizeQVariant": "variant",
    "ReadCacheVariant": "variant",
    "TsmlaError": "errors",
    "UnsupportedError": "errors",
    "WriteCacheVariant": "variant",
    "binary_status": "tools.status",
    "decode_workspace_size": "workspace",
    "has_binary_decode": "tools.status",
    "has_binary_prefill": "tools.status",
    "mla_kv_pack_quantize_fp8": "pack",
    "mla_quantize_q": "quantize_q",
    "mla_read_cache": "read_cache",
    "mla_write_cache": "write_cache",
    "served": "resolve",
    "tsmla_decode": "decode",
    "tsmla_prefill": "prefill",
    "variant_status": "tools.status",
    "warmup": "prepare",
    "why_unsupported": "support",
}

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import distributions, version

        if __name__ != "tsmla":  # loaded by Hugging Face's `kernels`, from a folder with this copy's own metadata
            return next(iter(distributions(name="tsmla", path=__path__))).version
        return version("tsmla")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tsmla' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
