"""The closed form, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.zftune.planner.fixtures import MEGA, toy_machine, toy_rates, toy_split
from zenflow import ZenFlowConfig
from zftune.planner.closed_form import collective_ms, floor, least_window, mean_staleness
from zftune.planner.model import Job, ModelFacts
from zftune.planner.rates import Rates, compute_ms, products_of
from zftune.planner.simulate import simulate

GIGA = 10**9


def rates(**changes: float | int | bool | None) -> Rates:
    known = {"forward_ms": 30.0, "backward_ms": 70.0, "d2h_gbps": 25.0, "h2d_gbps": 25.0, "host_gbps": 100.0}
    return Rates(**(known | changes))  # type: ignore[arg-type]


def test_a_host_update_moves_28_and_4_bytes_a_step() -> None:
    # 1e9 elements, S = 4: 24 of state, 8 of gradients, 2 of result, and the link's 8 and 2: 44 GB at 100 GB/s.
    assert rates().host_ms(GIGA, 4) == pytest.approx(440.0)
    # On a rig the link's bytes cost the host nothing: 26 + 2 S.
    assert rates(link_in_host=False).host_ms(GIGA, 4) == pytest.approx(340.0)


def test_replay_is_bound_by_arithmetic_where_the_cores_are_few() -> None:
    few = rates(update_gelements_s=5.0)
    assert few.host_ms(GIGA, 4) == pytest.approx(800.0)
    assert few.host_ms(GIGA, 4, 1) == pytest.approx(440.0)  # the mean is one update


@pytest.mark.parametrize(
    ("host_gbps", "cores", "compute", "least"),
    [
        (100.0, None, 100.0, 5),  # 280 + 40 S <= 100 S from 4.67 on
        (100.0, None, 320.0, 1),  # 280 + 40 <= 320
        (100.0, None, 319.0, 2),
        (100.0, None, 40.0, None),  # the gradients alone take all of the host
        (100.0, None, 40.1, 2800),  # 280 <= 0.1 S
        (100.0, 5.0, 150.0, None),  # replay alone takes 200 ms a step
        (100.0, 5.0, 201.0, 2),  # 280 + 40 S <= 201 S from 1.74 on
    ],
)
def test_the_least_window(host_gbps: float, cores: float | None, compute: float, least: int | None) -> None:
    found = least_window(rates(host_gbps=host_gbps, update_gelements_s=cores), GIGA, compute)
    assert found == least


def test_nothing_deferred_needs_no_window() -> None:
    assert least_window(rates(), 0, 1.0) == 1


def test_the_floor_is_the_busiest_resource() -> None:
    # A million elements: 5 ms down, 8 ms up, 26 + 2 S of 28 parts of 56 ms on the host.
    split, config = toy_split(MEGA), ZenFlowConfig(topk_ratio=0.0, update_interval=4)
    found = floor(toy_rates(d2h=5, h2d=8, host=56), split, config)
    assert found.loads_ms == pytest.approx({"compute": 30.0, "d2h": 5.0, "h2d": 2.0, "host": 17.0})
    assert (found.bound_by, found.s_min) == ("compute", 2)  # 52 + 4 S <= 30 S
    assert found.step_ms == pytest.approx(30.0)
    slow = floor(toy_rates(d2h=50, h2d=8, host=56), split, config)
    assert slow.bound_by == "d2h"
    assert slow.step_ms == pytest.approx(50.0)


def test_what_follows_each_other_adds_up() -> None:
    split = toy_split(MEGA)
    bucket = ZenFlowConfig.zero_offload(pipeline="bucket")
    assert floor(toy_rates(d2h=5, h2d=8, host=56), split, bucket).step_ms == pytest.approx(20 + 56)
    in_turn = floor(toy_rates(d2h=5, h2d=8, host=56), split, ZenFlowConfig.zero_offload())
    assert in_turn.step_ms == pytest.approx(30 + 56 + 8)


def test_ranks_with_whole_weights_send_beside_nothing() -> None:
    """Two buckets of a million elements between two ranks: 1 MB averaged and 1 MB gathered of each, at 0.1 GB/s."""
    split = replace(toy_split(MEGA, MEGA), exchanged=(MEGA, MEGA))
    rates = replace(toy_rates(d2h=5, h2d=8, host=56), ranks=2, comm_gbps=0.1, keeps_whole=True)
    windows = ZenFlowConfig(topk_ratio=0.0, update_interval=4)
    found = floor(rates, split, windows)
    assert found.loads_ms["comm"] == pytest.approx(40.0)
    assert found.step_ms == pytest.approx(30 + 40)
    assert found.bound_by == "comm"
    in_turn = floor(rates, split, ZenFlowConfig.zero_offload())
    assert in_turn.step_ms == pytest.approx(30 + 40 + 56 + 8)
    assert floor(rates, split, ZenFlowConfig.zero_offload(pipeline="bucket")).step_ms == pytest.approx(30 + 40 + 56)
    assert simulate(rates, split, windows).stall_ms["comm"] == pytest.approx(40.0)


def test_staleness() -> None:
    # Windows of 4: gradients are 0 to 3 steps old at the close; two pieces are shown 1 and 4 steps later.
    split = toy_split(MEGA, MEGA)
    shown = [replace(piece, due=due) for piece, due in zip(split.pieces, (1, 4), strict=True)]
    windows = ZenFlowConfig(topk_ratio=0.0, update_interval=4)
    assert mean_staleness(replace(split, pieces=tuple(shown)), windows) == pytest.approx(1.5 + 2.5)
    assert mean_staleness(split, ZenFlowConfig.zero_offload()) == 0


def test_compute_follows_from_operations() -> None:
    # 1e9 parameters and 1000 tokens: 2e12 operations forward, at half of 100 TFLOPS, and attention's products.
    model = ModelFacts.from_text("1B,10,1000")
    machine = toy_machine()
    attention = 2.0 * 10 * 1000 * 1000 * 1000
    forward, backward = compute_ms(model, machine, Job(seq=1000))
    assert forward == pytest.approx((2.0 * model.parameters * 1000 + attention) / 50e12 * 1e3)
    assert backward == pytest.approx(2 * forward)
    # Recomputed is all but each layer's last product.
    again = forward - 2.0 * 10 * 1000 * model.intermediate * 1000 / 50e12 * 1e3
    recomputed = compute_ms(model, machine, Job(seq=1000, checkpointing=True))
    assert recomputed == pytest.approx((forward, 2 * forward + again))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # newer transformers
@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    module = LlamaForCausalLM(config).train()
    model, tokens = ModelFacts.from_module("llama", module), torch.arange(32)[None]
    for checkpointing in (False, True):
        if checkpointing:
            module.gradient_checkpointing_enable()
        with FlopCounterMode(display=False) as forward:
            loss = module(input_ids=tokens, labels=tokens).loss
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        # Of attention on a CPU torch counts nothing; we count norms, and it does not.
        attention = 2 * model.layers * model.hidden * 32 * 32
        products, again = products_of(model, Job(seq=32, checkpointing=checkpointing))
        assert products - attention == pytest.approx(forward.get_total_flops(), rel=0.002)
        own = again - attention if checkpointing else 0.0
        assert 2 * (products - attention) + own == pytest.approx(backward.get_total_flops(), rel=0.002)


def test_few_tokens_cost_reading_the_weights() -> None:
    model = ModelFacts.from_text("1B,10,1000")
    forward, backward = compute_ms(model, toy_machine(), Job(seq=1))
    assert forward == pytest.approx(2 * model.parameters / 1000e9 * 1e3)
    assert backward == pytest.approx(3 * forward)


def test_measured_compute_is_taken_as_it_is() -> None:
    model = ModelFacts.from_name("tiny")
    assert compute_ms(model, toy_machine(), Job(compute_ms=90.0)) == pytest.approx((30.0, 60.0))
    assert compute_ms(model, toy_machine(), Job(forward_ms=1.0, backward_ms=5.0)) == (1.0, 5.0)


def test_ranks_share_the_host_and_have_links_of_their_own() -> None:
    model, machine = ModelFacts.from_name("tiny"), toy_machine()
    found = Rates.of(model, machine, Job(gpus=4))
    assert (found.host_gbps, found.update_gelements_s, found.d2h_gbps) == (25.0, 12.5, 25.0)
    # Of 1e9 elements each of four ranks sends three quarters: 1.5 GB at 20 GB/s.
    assert found.gather_ms(GIGA) == found.reduce_ms(GIGA) == pytest.approx(75.0)
    assert replace(found, gloo=True).reduce_ms(GIGA) == pytest.approx(150.0)
    assert found.add_up_ms(GIGA) == pytest.approx(300.0)  # fp32, there and back
    assert Rates.of(model, machine, Job()).gather_ms(GIGA) == 0.0


def test_the_collectives_are_fsdp2s() -> None:
    # Two layers of 1e9 elements each and a rest of half of that, trained but for half of the layers.
    half = GIGA // 2
    split = replace(toy_split(MEGA), gathered=(GIGA, GIGA, half), reduced=(half, half, half), words=10**6)
    four = replace(rates(), ranks=4, comm_gbps=20.0)
    assert collective_ms(four, split) == pytest.approx(75.0 * (2.5 + 2 + 1.5) + 0.3)
    assert collective_ms(replace(four, reshard=False), split) == pytest.approx(75.0 * (2.5 + 1.5) + 0.3)
