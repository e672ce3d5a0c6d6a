"""Where the order of a prefill's query tiles changes. Pure Python, for models of that order, too."""

from __future__ import annotations

L2_SECTION_BYTES = 24 * 1024 * 1024
"""Keys and values of the heads worked on at a time: about half of the H200's 50 MB L2."""
SIDE_BY_SIDE = 132
"""Query tiles that run side by side, about (an H200 has 132 SMs). Where tiles differ only in rows, the tiles of as many
heads as make these up come together, those with fewer rows last."""
ALIKE = 8
"""Keys of a sequence, in multiples of its queries, beyond which a causal mask makes query tiles differ by little."""
LIST_WORDS = 4
"""Words that say where a query tile's list of KV tiles is (`visits.list_of`)."""
