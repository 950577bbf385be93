"""Runs a step's work through the model: tensors live here and nowhere above."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AttentionInterface

from fourhop.engine.attention import ATTENTION, PagedKV, paged_attention
from fourhop.engine.batch import build_batch
from fourhop.engine.layers import fuse_layers
from fourhop.engine.model import LoadedModel
from fourhop.engine.sampled import Computed
from fourhop.engine.sampler import SampleRow, prompt_logprobs, sample
from fourhop.engine.step import Work
from fourhop.kv.layout import KVPool
from fourhop.wire.logprobs import PromptLogprob

AttentionInterface.register(ATTENTION, paged_attention)


class Runner:
    """A loaded model over a KV pool.

    On CPU the model reads and writes the pool's own memory, the memory that connectors copy from and to. On another
    device the pool is a copy for connectors: `stage_out` and `stage_in` move blocks between it and the device.
    """

    def __init__(self, model: LoadedModel, pool: KVPool, device: torch.device) -> None:
        self._model = model
        if device.type == "cpu" and model.dtype == torch.float32:
            fuse_layers(model.module, paged_attention, model.sliding_windows)
        self._block_size = pool.layout.block_size
        layout = pool.layout
        shape = (layout.num_planes, layout.num_blocks * layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._host = torch.from_numpy(pool.planes.reshape(-1)).view(model.dtype).view(shape)
        self._planes = self._host if device.type == "cpu" else torch.zeros(shape, dtype=model.dtype, device=device)
        self._device = device

    @torch.inference_mode()
    def run(self, work: list[Work]) -> Computed:
        """Compute the step, sample where a sequence reached its last token, and look at the prompts that ask for it.

        No token can be chosen where the logits are not numbers, or the parameters forbid every token.
        """
        batch = build_batch(work, self._block_size)
        paged = PagedKV(self._planes, self._tensor(batch.slots), batch.spans)
        sampling = [item.sequence for item in work if item.samples]
        output = self._model.module(
            input_ids=self._tensor(batch.token_ids)[None],
            position_ids=self._tensor(batch.positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(batch.sample_rows + batch.prompt_rows or [0]),
            paged_kv=paged,
        )
        logits = output.logits[0].float()
        num_sampled = len(batch.sample_rows)
        rows = [
            SampleRow(
                params=sequence.params,
                seed=sequence.seed,
                position=sequence.num_tokens,
                prompt_token_ids=sequence.prompt_token_ids,
                output_token_ids=sequence.output_token_ids,
                eos_token_ids=sequence.eos_token_ids,
                allowed=None if sequence.allowed is None else sequence.allowed(sequence.output_token_ids),
            )
            for sequence in sampling
        ]
        sampled = sample(logits[:num_sampled], rows)
        return Computed(
            {sequence.seq_id: token for sequence, token in zip(sampling, sampled, strict=True)},
            _prompt_logprobs(logits[num_sampled:], work) if batch.prompt_rows else {},
        )

    def stage_out(self, blocks: list[int]) -> None:
        """Bring blocks from the device to the pool's memory, before they are published."""
        self._copy(blocks, self._planes, self._host)

    def stage_in(self, blocks: list[int]) -> None:
        """Bring pulled blocks from the pool's memory to the device."""
        self._copy(blocks, self._host, self._planes)

    def _copy(self, blocks: list[int], source: torch.Tensor, target: torch.Tensor) -> None:
        if source is target or not blocks:
            return
        slots = np.add.outer(np.asarray(blocks) * self._block_size, np.arange(self._block_size)).reshape(-1)
        target[:, torch.from_numpy(slots).to(target.device)] = source[:, torch.from_numpy(slots).to(source.device)].to(
            target.device
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _prompt_logprobs(logits: torch.Tensor, work: list[Work]) -> dict[int, list[dict[int, PromptLogprob]]]:
    """Of each prompt that asks for them, by sequence id. `logits` has the rows of all, in the order of `work`."""
    found = {}
    for item in work:
        num_rows, num_top = item.num_prompt_logits, item.sequence.params.prompt_logprobs
        if num_rows and num_top is not None:
            rows, logits = logits[:num_rows], logits[num_rows:]
            following = item.sequence.token_ids[item.start + 1 : item.start + 1 + num_rows]
            found[item.sequence.seq_id] = prompt_logprobs(rows, following, num_top)
    return found
