"""Laws 1, 2, 3, 6, 7 and 8 on every model of the registry."""

import pytest
import torch

import laws
from registry import CASES, Case

every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
oracled = pytest.mark.parametrize("case", [c for c in CASES if c.oracle == "hf"], ids=lambda c: c.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])


@every
@dtypes
def test_outputs_are_untouched(case: Case, dtype: torch.dtype) -> None:
    laws.outputs_are_untouched(case, dtype)


@every
@dtypes
def test_training_is_untouched(case: Case, dtype: torch.dtype) -> None:
    laws.training_is_untouched(case, dtype)


@oracled
def test_attention_is_true(case: Case) -> None:
    laws.attention_is_true(case)


@oracled
def test_hidden_states_are_true(case: Case) -> None:
    laws.hidden_states_are_true(case)


@every
def test_nothing_is_left_behind(case: Case) -> None:
    laws.nothing_is_left_behind(case)


@every
def test_no_host_round_trip(case: Case) -> None:
    own = laws.no_host_round_trip(case)
    if own is not None:
        pytest.skip(f"{case.name} itself, without a probe, does not run on fake tensors: {own.splitlines()[0]}")


@every
def test_the_report_tells(case: Case) -> None:
    laws.the_report_tells(case)
