"""Attention over the block pool, plugged into transformers' attention interface.

Every layer calls `paged_attention` with the batch's rows. It writes the rows' keys and values into the pool, then each
sequence attends to its own context there. A context of neighbouring blocks is read in place; a scattered one is
gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from fourhop.engine.batch import Run, Span

ATTENTION = "fourhop_paged"


@dataclass(frozen=True)
class PagedKV:
    """What a forward pass needs of the pool.

    `planes` is [2 · layers, slots, kv_heads, head_dim], plane 2·l the keys and 2·l+1 the values of layer l. `slots`
    [rows] says where each row's own keys and values go.
    """

    planes: torch.Tensor
    slots: torch.Tensor
    spans: list[Span]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged_kv: PagedKV,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, rows, dim], key and value [1, kv_heads, rows, dim].

    Returns [1, rows, heads, dim]. Raises NotImplementedError for variants that change the scores (soft caps, sinks).
    """
    refused = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if refused:
        raise NotImplementedError(f"attention with {', '.join(refused)} is not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = paged_kv.planes[2 * layer], paged_kv.planes[2 * layer + 1]
    keys[paged_kv.slots] = key[0].transpose(0, 1)
    values[paged_kv.slots] = value[0].transpose(0, 1)
    output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    for span in paged_kv.spans:
        rows = slice(span.first_row, span.first_row + span.num_tokens)
        output[rows] = _attend(
            query[0, :, rows], _context(keys, span), _context(values, span), span.start, scaling, sliding_window
        )
    return output.unsqueeze(0), None


def _context(plane: torch.Tensor, span: Span) -> torch.Tensor:
    """A span's keys or values, [kv_heads, context, dim]; without a copy when its slots are neighbours."""
    parts = [_slice(plane, run) for run in span.context_runs]
    context = parts[0] if len(parts) == 1 else torch.cat(parts)
    return context.transpose(0, 1)


def _slice(plane: torch.Tensor, run: Run) -> torch.Tensor:
    return plane[run[0] : run[0] + run[1]]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of one sequence: query [heads, rows, dim], keys and values [kv_heads, context, dim].

    Query heads that share a kv head are put beside each other, so keys and values are never repeated in memory: for a
    single row they become rows of one product, for several they are the heads of a batch of kv heads.
    """
    num_heads, num_rows, dim = query.shape
    num_kv_heads, num_context, _ = keys.shape
    group = num_heads // num_kv_heads
    if sliding_window is not None and num_rows == 1:
        keys, values = keys[:, -sliding_window:], values[:, -sliding_window:]
    if num_rows == 1:
        shared = query.reshape(1, num_kv_heads, group, dim)
        out = scaled_dot_product_attention(shared, keys[None], values[None], scale=scaling)
        return out.reshape(1, num_heads, dim)
    grouped = query.reshape(num_kv_heads, group, num_rows, dim)
    shape = (num_kv_heads, group, num_context, dim)
    keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
    window = sliding_window if sliding_window is not None and num_context > sliding_window else None
    if window is None and start > 0 and query.device.type == "cpu":
        out = _attend_in_two(grouped, keys, values, start, scaling)
    else:
        plain = start == 0 and window is None
        mask = None if plain else _mask(num_rows, start, window, query.device)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, is_causal=plain, scale=scaling)
    return out.reshape(num_heads, num_rows, dim).transpose(0, 1)


def _attend_in_two(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float | None
) -> torch.Tensor:
    """What all rows see whole, then their own triangle, put together by how much weight each part had.

    Without a mask, which costs a third of the time. `flash` is what scaled_dot_product_attention calls on CPU; it also
    returns the logarithm of the softmax's denominator, from which the parts' weights follow.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before, weight_before = flash(query, keys[:, :, :start], values[:, :, :start], scale=scaling)
    own, weight_own = flash(query, keys[:, :, start:], values[:, :, start:], is_causal=True, scale=scaling)
    return torch.lerp(before, own, torch.sigmoid(weight_own - weight_before).to(own.dtype)[..., None])


def _mask(num_rows: int, start: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of `start + num_rows` positions each row sees, [rows, context]."""
    rows = torch.arange(start, start + num_rows, device=device)[:, None]
    columns = torch.arange(start + num_rows, device=device)[None, :]
    seen = columns <= rows
    return seen if window is None else seen & (columns > rows - window)
