"""Laws 1, 2, 3, 6, 7 and 8 on every model of the registry."""

import pytest
import torch

import laws
from registry import CASES, Case

every = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
oracled = pytest.mark.parametrize("case", [c for c in CASES if c.oracle == "hf"], ids=lambda c: c.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])


# What these models do themselves, without a probe, fake `cuda` tensors cannot follow; their host reads are counted on the CPU.
NOT_FAKED = {
    "deberta-v2": "runs TorchScript",
    "mixtral": "asks the driver which grouped products the device has",
    "gpt_oss": "asks the driver which grouped products the device has",
    "beit": "keeps a tensor that is no buffer",
    "nn.TransformerEncoder": "makes nested tensors, whose sizes live on the host",
}


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
    laws.no_reads_but_the_models_own(case)
    failed = laws.no_host_round_trip(case)
    assert (failed is None) == (case.name not in NOT_FAKED), failed


@every
def test_the_report_tells(case: Case) -> None:
    laws.the_report_tells(case)
