from .decode import tsmla_decode as tsmla_decode
from .errors import ArgumentError as ArgumentError
from .errors import KernelUnavailable as KernelUnavailable
from .errors import LibraryError as LibraryError
from .errors import ManifestError as ManifestError
from .errors import TsmlaError as TsmlaError
from .errors import UnsupportedError as UnsupportedError
from .pack import mla_kv_pack_quantize_fp8 as mla_kv_pack_quantize_fp8
from .prefill import tsmla_prefill as tsmla_prefill
from .prepare import warmup as warmup
from .read_cache import mla_read_cache as mla_read_cache
from .resolve import served as served
from .support import why_unsupported as why_unsupported
from .tools.status import binary_status as binary_status
from .tools.status import has_binary_decode as has_binary_decode
from .tools.status import has_binary_prefill as has_binary_prefill
from .tools.status import variant_status as variant_status
from .variant import Arch as Arch
from .variant import DecodeVariant as DecodeVariant
from .variant import Dtype as Dtype
from .variant import PackVariant as PackVariant
from .variant import PrefillVariant as PrefillVariant
from .variant import ReadCacheVariant as ReadCacheVariant
from .variant import WriteCacheVariant as WriteCacheVariant
from .workspace import decode_workspace_size as decode_workspace_size
from .write_cache import mla_write_cache as mla_write_cache

__version__: str
