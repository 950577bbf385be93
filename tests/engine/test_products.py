"""Products in panels are the products of plain linear layers, for every number of rows and outputs."""

from __future__ import annotations

import pytest
import torch

from fourhop.engine.products import PanelLinear, split_into_panels


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_outputs", [192, 48, 40, 7])
@torch.inference_mode()
def test_every_number_of_rows_has_the_plain_layers_values(num_outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(32, num_outputs, bias=bias)
    panels = PanelLinear(plain)
    for num_rows in range(20):
        rows = torch.randn(1, num_rows, 32)
        assert panels(rows).shape == plain(rows).shape
        torch.testing.assert_close(panels(rows), plain(rows))


@torch.inference_mode()
def test_a_view_of_rows_is_read_as_it_is() -> None:
    plain = torch.nn.Linear(32, 64)
    rows = torch.randn(32, 8).t()
    torch.testing.assert_close(PanelLinear(plain)(rows), plain(rows))


def test_weights_are_shared_and_other_layers_stay() -> None:
    inner = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(64, 8))
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), inner)
    weights = list(module.parameters())
    split_into_panels(module)
    assert [type(each) for each in (module[0], inner[0], inner[1])] == [PanelLinear, torch.nn.GELU, PanelLinear]
    assert all(before is after for before, after in zip(weights, module.parameters(), strict=True))
