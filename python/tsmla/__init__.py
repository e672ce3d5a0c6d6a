"""MLA (Multi-head Latent Attention) GPU kernels that are already compiled.

Importing this costs nothing: torch, TVM-FFI and the compiler are imported when a name that needs them is first used.
"""

import importlib

_MODULE_OF = {
    "Arch": "identity.arch",
    "ArgumentError": "errors",
    "DecodeVariant": "identity.variant",
    "Dtype": "identity.variant",
    "KernelUnavailable": "errors",
    "KeyMaskVariant": "identity.variant",
    "LibraryError": "errors",
    "ManifestError": "errors",
    "PackVariant": "identity.variant",
    "PrefillVariant": "identity.variant",
    "QuantizeQVariant": "identity.variant",
    "ReadCacheVariant": "identity.variant",
    "TsmlaError": "errors",
    "UnsupportedError": "errors",
    "WriteCacheVariant": "identity.variant",
    "binary_status": "loading.status",
    "decode_workspace_size": "operators.workspace",
    "has_binary_decode": "loading.status",
    "has_binary_prefill": "loading.status",
    "mla_kv_pack_quantize_fp8": "operators.pack",
    "mla_quantize_q": "operators.quantize_q",
    "mla_read_cache": "operators.read_cache",
    "mla_write_cache": "operators.write_cache",
    "served": "loading.resolve",
    "tsmla_decode": "operators.decode",
    "tsmla_key_mask": "operators.key_mask",
    "tsmla_prefill": "operators.prefill",
    "tsmla_sparse_prefill": "operators.sparse_prefill",
    "variant_status": "loading.status",
    "warmup": "operators.prepare",
    "why_unsupported": "identity.support",
}

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import distributions

        # Hugging Face's `kernels` loads a copy under another name, from a folder with the copy's own metadata.
        where = {} if __name__ == "tsmla" else {"path": __path__}
        found = next(iter(distributions(name="tsmla", **where)), None)
        return "unknown" if found is None else found.version
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tsmla' has no attribute {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
