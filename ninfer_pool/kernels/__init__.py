"""The operations of a hybrid model over pages: CPU runs the reference, CUDA runs Triton.

Each has one signature, documented in reference.py.

- H query heads, G KV heads, D head_dim.
- Hk, Hv key and value heads of linear attention, Dk, Dv their dims.
- T tokens, R rows, B lanes, S steps of a lane in a round, P pages.
- C convolution channels, W its width.

- `append_kv`: write k, v (T, G, D) to their slots, quantised where the pages are INT8.
- `attention_prefill`: q (T, H, D) over one lane's pages, causal.
- `attention_decode`: q (R, H, D), each row over its own pages and length.
- `delta_prefill`: the gated delta rule over T tokens, from any state to the state at the end.
- `delta_step`: the same over S tokens of B lanes, keeping the state after each.
- `conv_prefill`: causal convolution with silu over x (T, C).
- `conv_step`: the same over x (B, S, C), keeping the columns after each.
- `copy_pages`: pages of the slab to other pages.
- `save_image`: a lane's state to pages; load_image the other way.
- `first_difference`: the first index at which two token sequences differ.

No data outside the positions of a call reaches its result, NaN included. A row's bits in
``attention_decode``, ``delta_step`` and ``conv_step`` depend on that row alone.
"""

from __future__ import annotations

from ninfer_pool.kernels import reference
from ninfer_pool.kernels.dispatch import dispatched
from ninfer_pool.kernels.pages import GROUP, PAGE_TOKENS, KVPages

append_kv = dispatched(reference.append_kv)
attention_decode = dispatched(reference.attention_decode)
attention_prefill = dispatched(reference.attention_prefill)
conv_prefill = dispatched(reference.conv_prefill)
conv_step = dispatched(reference.conv_step)
copy_pages = dispatched(reference.copy_pages)
delta_prefill = dispatched(reference.delta_prefill)
delta_step = dispatched(reference.delta_step)
first_difference = dispatched(reference.first_difference)
load_image = dispatched(reference.load_image)
save_image = dispatched(reference.save_image)

__all__ = [
    "GROUP",
    "PAGE_TOKENS",
    "KVPages",
    "append_kv",
    "attention_decode",
    "attention_prefill",
    "conv_prefill",
    "conv_step",
    "copy_pages",
    "delta_prefill",
    "delta_step",
    "first_difference",
    "load_image",
    "save_image",
]
