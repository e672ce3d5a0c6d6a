"""Key masks from lists: bit b of word w of a query token says whether key 32 w + b is in its list.

A CTA has one token. It sets bits in shared memory, in any order: what has been set is the same in each. Then it writes
all of the token's words. A row of more than WORDS words takes several passes, each of which reads the list again.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.cutlass_dsl import select_
from tsmla.identity.call import KEY_MASK
from tsmla.identity.key_mask import MASK_BITS
from tsmla.identity.variant import KeyMaskVariant

from ..entry import host_entry
from ..parts import ptx
from ..parts.dependent_launch import follow_predecessor

THREADS = 256
WORDS = 4096
"""Words of a pass: 131,072 keys. Shared memory for these leaves room for all CTAs that an SM's threads allow."""
READ_AT_ONCE = 8
"""Indices of a list that a thread has under way: all of a list of 2,048."""


class KeyMaskKernel:
    """The maker of masks; calling it inside the compiler emits the launch."""

    def __init__(self, variant: KeyMaskVariant):
        pass

    __call__ = host_entry(KEY_MASK)

    def launch(self, given):
        """Launch a CTA for each token. given: what the call's table lists, by name."""
        self.kernel(given.indices, given.lengths, given.mask, given.keys).launch(
            grid=(given.indices.shape[0], 1, 1), block=(THREADS, 1, 1), stream=given.stream, use_pdl=given.pdl
        )

    @cute.kernel
    def kernel(self, indices: cute.Tensor, lengths: cute.Tensor, mask: cute.Tensor, keys: Int32):
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        shared = cute.make_tensor(cute.arch.alloc_smem(Int32, WORDS, alignment=16), cute.make_layout(WORDS))
        follow_predecessor()
        counted = indices.shape[1]
        if lengths.shape[0] > 0:
            counted = cutlass.min(lengths[token], counted)
        words = mask.shape[1]
        start = _row(indices, token)
        target = cute.make_tensor(
            cute.make_ptr(Int32, _row(mask, token), cute.AddressSpace.gmem, assumed_align=4), cute.make_layout(words)
        )
        for first in cutlass.range(0, words, WORDS, unroll=1):
            own = cutlass.min(words - first, WORDS)
            for word in cutlass.range(thread, own, THREADS, unroll=1):
                shared[word] = Int32(0)
            cute.arch.sync_threads()
            for place in cutlass.range(thread, counted, THREADS * READ_AT_ONCE, unroll=1):
                _set_bits(shared, start, place, counted, first, own, keys)
            cute.arch.sync_threads()
            for word in cutlass.range(thread, own, THREADS, unroll=1):
                target[first + word] = shared[word]  # the next pass clears only words that this thread has written


@cute.jit
def _set_bits(shared: cute.Tensor, start: Int64, place: Int32, counted: Int32, first: Int32, own: Int32, keys: Int32):
    """Set the bits of READ_AT_ONCE indices of a list from `place` on, as far as they count and lie in this pass."""
    address = start + Int64(place) * 4
    exist = [Boolean(place < counted - i * THREADS) for i in range(READ_AT_ONCE)]
    read = [ptx.load_if(exist[i], address, i * THREADS * 4, 1)[0] for i in range(READ_AT_ONCE)]
    for i in cutlass.range_constexpr(READ_AT_ONCE):
        key = select_(exist[i], read[i], Int32(-1))
        word = (key >> MASK_BITS.bit_length() - 1) - first
        # Words of other passes, and those of keys below 0, are large numbers without a sign.
        if (key < keys) & (Uint32(word) < Uint32(own)):
            bit = Int32(1) << (key & (MASK_BITS - 1))
            cute.arch.red(shared.iterator + word, bit, op="or", dtype="b32", sem="relaxed", scope="cta")


def _row(tensor: cute.Tensor, row: Int32) -> Int64:
    """The address of a row of 32-bit numbers."""
    return tensor.iterator.toint() + Int64(row) * Int64(tensor.stride[0]) * 4
