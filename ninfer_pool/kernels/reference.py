"""Every operation in plain torch: the CPU's implementation, and each Triton kernel's reference.

Two rules hold next to the formulas. No data outside the positions of a call may reach its result,
so data is excluded by selection, not by a factor: NaN times zero is NaN. Where rows of a decode
step share a call, a row's bits may not depend on its place among them; see `silu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from ninfer_pool.kernels.pages import GROUP, PAGE_TOKENS, KVPages

CHUNK = 64
"""Tokens that `delta_prefill` solves as one triangular system."""

SEGMENT = 4 * CHUNK
"""Tokens whose chunks `delta_prefill` prepares together: few enough for the processor's cache,
which is twice as fast as preparing all."""

CONV_PIECE = 1 << 16
"""Elements of a convolution that are computed at once, for the same reason."""

NORM_EPS = 1e-6
"""Added to the squared length of q and k before they are normalised."""


# Attention over pages


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return INT8 codes of ``x`` (…, D) and their fp16 scales (…, D // 64).

    Symmetric: a group's scale is its largest magnitude / 127, rounded to fp16; codes round half
    to even. A group too small for an fp16 scale becomes zeros.
    """
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    scale = (largest / 127).clamp(max=torch.finfo(torch.float16).max).half()
    divisor = torch.where(scale > 0, scale.float(), torch.inf)
    codes = (groups / divisor).round().clamp(-127, 127).to(torch.int8)
    return codes.flatten(-2), scale.squeeze(-1)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return codes (…, D) times the scales (…, D // 64) of their groups, rounded to ``dtype``."""
    groups = codes.float().view(*codes.shape[:-1], codes.shape[-1] // GROUP, GROUP)
    return groups.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def append_kv(cache: KVPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write k and v (T, G, D) to the slots (T,) = page × 64 + offset; a slot of -1 writes nothing.

    Quantises where the cache is INT8. No slot but -1 may come twice.
    """
    kept = (slots >= 0).nonzero().squeeze(-1)
    if len(kept) != len(slots):
        k, v, slots = k[kept], v[kept], slots[kept]
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    for x, values, scales in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        if scales is None:
            values[page, :, offset] = x.to(values.dtype)
        else:
            values[page, :, offset], scales[page, :, offset] = quantise(x)


def _gather(
    values: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Copy pages (P,) of one layer's K or V into one (G, P × 64, D) of ``dtype``."""
    found = values.index_select(0, pages).transpose(0, 1)
    if scales is not None:
        found = dequantise(found, scales.index_select(0, pages).transpose(0, 1), dtype)
    return found.to(dtype).flatten(1, 2)


def gather_kv(
    cache: KVPages, table: torch.Tensor, *, begin: int, end: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V (G, end - begin, D) of the positions [begin, end) of the table's pages."""
    low, high = begin // PAGE_TOKENS, -(-end // PAGE_TOKENS)
    window = slice(begin - low * PAGE_TOKENS, end - low * PAGE_TOKENS)
    pages = table[low:high]
    k = _gather(cache.k, cache.k_scale, pages, dtype)[:, window]
    v = _gather(cache.v, cache.v_scale, pages, dtype)[:, window]
    return k, v


def attention_prefill(
    q: torch.Tensor,
    cache: KVPages,
    table: torch.Tensor,
    *,
    begin: int,
    scale: float,
    first: int = 0,
) -> torch.Tensor:
    """Attend from q (T, H, D), row i to the positions [first, begin + i] of ``table`` (P,).

    softmax(scale × q Kᵀ) V, causal; query head h reads KV head h // (H // G). A row without
    positions is zeros. Returns (T, H, D) in q's dtype.
    """
    tokens, heads, dim = q.shape
    end, blind = begin + tokens, min(max(first - begin, 0), tokens)
    if blind == tokens:
        return torch.zeros_like(q)
    k, v = gather_kv(cache, table, begin=first, end=end, dtype=q.dtype)
    # Batch = KV heads and heads = their query heads, so that K and V broadcast without a copy.
    grouped = q[blind:].reshape(tokens - blind, cache.heads, -1, dim).permute(1, 2, 0, 3)
    k, v = (x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
    rows, columns = grouped.shape[2], k.shape[2]
    mask = None
    if rows != columns:
        mask = q.new_ones(rows, columns, dtype=torch.bool).tril_(columns - rows)
    seen = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    out = seen.permute(2, 0, 1, 3).reshape(tokens - blind, heads, dim)
    return F.pad(out, (0, 0, 0, 0, blind, 0)) if blind else out


def attention_decode(
    q: torch.Tensor,
    cache: KVPages,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    first: int = 0,
) -> torch.Tensor:
    """Attend from q (R, H, D), row r to the positions [first, lengths[r]) of tables (R, P)[r].

    A row without positions is zeros. Each row is one call over exactly its own positions, so its
    bits depend on nothing else. Neighbouring rows of one table, as a lane has when drafts are
    verified, share the copy of its pages. Returns (R, H, D) in q's dtype.
    """
    out, ends = torch.zeros_like(q), lengths.tolist()
    for rows in _runs(tables):
        end = max(ends[row] for row in rows)
        if end > first:
            k, v = gather_kv(cache, tables[rows.start], begin=first, end=end, dtype=q.dtype)
            for row in rows:
                seen = max(ends[row] - first, 0)
                out[row] = _attend_row(q[row], k[:, :seen], v[:, :seen], scale=scale)
            del k, v  # so that the next lane's can use the same memory
    return out


def _runs(tables: torch.Tensor) -> Iterator[range]:
    """Yield neighbouring rows with equal tables."""
    parts = (tables[1:] != tables[:-1]).any(1).nonzero().flatten() + 1
    edges = [0, *parts.tolist(), len(tables)]
    return (range(begin, end) for begin, end in pairwise(edges))


def _attend_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Attend from one row q (H, D) to k, v (G, n, D); zeros where n is 0."""
    if not k.shape[1]:
        return torch.zeros_like(q)
    # The query heads of a KV head are its rows. A copy of its own starts every row alike.
    grouped = q.clone().view(1, k.shape[0], -1, q.shape[1])
    return F.scaled_dot_product_attention(grouped, k[None], v[None], scale=scale).view(q.shape)


# Gated delta rule: S ← exp(g) S;  S ← S + k ⊗ beta (v - kᵀ S);  out = qᵀ S


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in fp32, each vector of the last dimension scaled to length one."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """(T, H, D) -> a fp32 copy (N, H, size, D), zeros behind the last token."""
    missing = -len(x) % size
    x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    chunks = x.view(-1, size, *x.shape[1:]).transpose(1, 2)
    return chunks.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule over T tokens from ``state``; also return the state at their end.

    Key head h // (Hv // Hk) serves value head h. q and k are L2-normalised here, and q is scaled
    by Dk ** -0.5. Chunked form of Yang, Kautz and Hatamizadeh 2024 (Gated Delta Networks, section
    3.3): one triangular system per chunk of 64 tokens, the state between chunks.
    O(T (64 + Dk) Dv Hv).

    Args:
        q, k: (T, Hk, Dk).
        v: (T, Hv, Dv).
        g: (T, Hv) fp32, log decay.
        beta: (T, Hv) fp32.
        state: (Hv, Dk, Dv) fp32, not changed.

    Returns:
        The output (T, Hv, Dv) in v's dtype, and the new state.
    """
    out = torch.empty_like(v)
    for begin in range(0, len(v), SEGMENT):
        part = slice(begin, begin + SEGMENT)
        inputs = q[part], k[part], v[part], g[part], beta[part]
        state = _delta_segment(*inputs, state, out=out[part], size=min(CHUNK, len(v)))
    return out, state


def _delta_segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    out: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """Fill ``out`` and return the state at the end, in chunks of ``size`` tokens.

    With d the decay summed from a chunk's begin, u_i = beta_i (v_i - exp(d_i) Sᵀ k_i
    - sum over j < i of exp(d_i - d_j) (k_i·k_j) u_j) is what token i writes.
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = (_chunks(normalise(x), size) for x in (q, k))
    q.mul_(q.shape[3] ** -0.5)
    system, within = k @ k.mT, q @ k.mT
    if repeats > 1:
        q, k, system, within = (x.repeat_interleave(repeats, 1) for x in (q, k, system, within))
    rate, decay = _chunks(beta.unsqueeze(-1), size), _chunks(g.unsqueeze(-1), size).cumsum(2)
    # exp(d_i - d_j), zero above the diagonal, where it could overflow.
    above = torch.ones(size, size, dtype=torch.bool, device=v.device).triu_(1)
    between = (decay - decay.mT).masked_fill_(above, -torch.inf).exp_()
    since_begin, until_end = decay.exp(), (decay[:, :, -1:] - decay).exp()
    system.mul_(between).mul_(rate)
    within.mul_(between)
    written, read = (
        torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
        for x in (_chunks(v, size).mul_(rate), k * (since_begin * rate))
    )
    q.mul_(since_begin)
    k.mul_(until_end)
    for i in range(len(k)):
        u = torch.baddbmm(written[i], read[i], state, alpha=-1)
        seen = torch.bmm(q[i], state).baddbmm_(within[i], u).transpose(0, 1)
        out[i * size : (i + 1) * size] = seen[: len(out) - i * size]
        state = (state * since_begin[i, :, -1:]).baddbmm_(k[i].mT, u)
    return state


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule token by token: S tokens of B lanes, keeping each step's state.

    Otherwise as `delta_prefill`.

    Args:
        q, k: (B, S, Hk, Dk).
        v: (B, S, Hv, Dv).
        g, beta: (B, S, Hv) fp32.
        state: (B, Hv, Dk, Dv) fp32, not changed.

    Returns:
        The output (B, S, Hv, Dv) in v's dtype, and the state after each step, fp32
        (B, S, Hv, Dk, Dv).
    """
    repeats = v.shape[2] // k.shape[2]
    pair = torch.stack((normalise(k), normalise(q) * q.shape[3] ** -0.5), -2)
    pair = pair.repeat_interleave(repeats, 2)  # (B, S, Hv, 2, Dk)
    along = (pair[..., :1, :] * pair[..., 1:, :]).sum(-1)
    keep, rate, values = g.exp().unsqueeze(-1), beta.unsqueeze(-1), v.float()
    states = state.new_empty(state.shape[0], v.shape[1], *state.shape[1:])
    out = torch.empty_like(values)
    for i in range(v.shape[1]):
        # k's and q's products with the decayed state, in one pass over it.
        read_k, read_q = (pair[:, i] @ state * keep[:, i].unsqueeze(-1)).unbind(2)
        change = (values[:, i] - read_k) * rate[:, i]
        out[:, i] = read_q + along[:, i] * change
        outer = pair[:, i, :, 0].unsqueeze(-1) * change.unsqueeze(-2)
        state = torch.addcmul(outer, state, keep[:, i].unsqueeze(-1), out=states[:, i])
    return out.to(v.dtype), states


# Causal convolution


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + exp(-x)) of fp32, an element's bits the same at every place.

    On a CPU torch's own ``silu`` rounds the last elements of a tensor, which fill no vector
    register, differently from the rest; ``exp`` and arithmetic do not.
    """
    return x / (1 + torch.exp(-x))


def _convolve(window: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Put silu(sum over taps j of window[…, t + j, :] × weight[:, j]) into ``out`` (…, T, C).

    Sums in fp32, in pieces of T that fit the processor's cache.
    """
    taps, tokens = weight.float().unbind(1), out.shape[-2]
    step = max(1, CONV_PIECE // out[..., 0, :].numel())
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        piece = window[..., begin : end + len(taps) - 1, :].float()
        total = piece[..., : end - begin, :] * taps[0]
        for j, tap in enumerate(taps[1:], 1):
            total.addcmul_(piece[..., j : j + end - begin, :], tap)
        out[..., begin:end, :] = silu(total)


def conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve x (T, C) along T, each channel with its own weight (C, W), then silu.

    ``columns`` (C, W - 1) are the inputs just before x, oldest first. Returns y (T, C) and the
    new columns (C, W - 1), both in x's dtype.
    """
    window, out = torch.cat((columns.mT, x)), torch.empty_like(x)
    _convolve(window, weight, out)
    return out, window[len(x) :].mT.contiguous()


def conv_step(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve S tokens of B lanes, x (B, S, C), keeping the columns after each.

    ``columns`` is (B, C, W - 1). Returns y (B, S, C) and columns (B, S, C, W - 1). Otherwise as
    `conv_prefill`.
    """
    window, out = torch.cat((columns.mT, x), 1), torch.empty_like(x)
    _convolve(window, weight, out)
    return out, window.unfold(1, weight.shape[1] - 1, 1)[:, 1:].contiguous()


# Bytes


def copy_pages(slab: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy rows of the slab, uint8 (N, page_bytes): targets[i] becomes sources[i].

    No target may be a source or come twice.
    """
    if slab.is_cpu:  # torch copies bytes one by one there, numpy whole rows
        rows = slab.numpy()
        rows[targets.numpy()] = rows[sources.numpy()]
    else:
        slab[targets] = slab[sources]


def save_image(slab: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy buffer, uint8 (n, page_bytes), to the slab's pages (n,): one scatter."""
    if slab.is_cpu:
        slab.numpy()[pages.numpy()] = buffer.numpy()
    else:
        slab[pages] = buffer


def load_image(slab: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy the slab's pages (n,) to buffer, uint8 (n, page_bytes): one gather."""
    torch.index_select(slab, 0, pages, out=buffer)


def first_difference(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the first index at which two int32 vectors of equal length n differ, or n."""
    differs = (a != b).nonzero()
    return int(differs[0]) if len(differs) else len(a)
