"""The draft head: what it writes alone is what it attends to; test_parity.py has its numbers."""

from __future__ import annotations

import pytest
import torch

from ninfer_pool.runner.forms import PREFILL, ROWS, Form
from ninfer_pool.runner.model import Model
from tests.runner.models import random_model
from tests.runner.runs import Run, nan_pages

TOKENS = 130


class Drafting:
    """A prefilled run and what its draft head takes."""

    def __init__(self, model: Model) -> None:
        assert model.draft_head is not None
        self.model, self.head, self.run = model, model.draft_head, Run(model)
        tokens = torch.randint(0, 199, (TOKENS,), generator=torch.Generator().manual_seed(8))
        self.embeddings, self.hidden = model.embed(tokens), self.run.prompt(tokens)

    def decode(self, begin: int, end: int) -> torch.Tensor:
        return self.head.decode(
            self.embeddings[begin:end],
            self.hidden[begin - 1 : end - 1],
            self.run.rows(begin, end),
            cache=self.run.draft_cache,
        )


@pytest.fixture
def drafting() -> Drafting:
    return Drafting(random_model(7))


@pytest.mark.parametrize("form", [PREFILL, ROWS])
def test_writing_alone_writes_the_same(form: Form, drafting: Drafting) -> None:
    run = drafting.run
    whole = drafting.decode(1, TOKENS)
    run.draft_cache = nan_pages(drafting.model, len(run.table) + 2)
    drafting.head.write(
        drafting.embeddings[1 : TOKENS - 3],
        drafting.hidden[: TOKENS - 4],
        positions=torch.arange(1, TOKENS - 3).expand(3, -1),
        cache=run.draft_cache,
        slots=run.slots(1, TOKENS - 3),
        form=form,
    )
    torch.testing.assert_close(drafting.decode(TOKENS - 3, TOKENS), whole[-3:])


def test_slot_zero_is_never_read(drafting: Drafting) -> None:
    drafting.decode(1, TOKENS)
    page, offset = divmod(int(drafting.run.slots(0, 1)), 64)
    assert drafting.run.draft_cache.k[page, :, offset].isnan().all()
    assert not drafting.decode(TOKENS - 1, TOKENS).isnan().any()


def test_a_folder_without_one_has_no_draft_head() -> None:
    assert random_model(7, mtp_num_hidden_layers=0).draft_head is None
