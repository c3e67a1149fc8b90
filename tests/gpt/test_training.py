import math

import numpy as np
import pytest
import torch

from specgrad import gpt
from specgrad.gpt.tuning import tune

TASK = gpt.Task(size="tiny", batch_size=4)
RECIPES = {
    "adamw": gpt.Recipe("adamw", 0.004, steps=8),
    "muon-out": gpt.Recipe("muon-out", 0.004, 0.02, steps=8),
    "muon": gpt.Recipe("muon", 0.004, 0.02, steps=8),
}


def comparable(records):
    """Records without wall-clock times, which are no result; NaN made comparable."""
    return [
        {k: ("nan" if isinstance(v, float) and math.isnan(v) else v) for k, v in record.items() if k != "seconds"}
        for record in records
    ]


@pytest.mark.parametrize("update", RECIPES)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, update):
    expected = gpt.simulate(TASK, RECIPES[update], probe_every=3)
    file = tmp_path / "state.pt"
    for stop_after in (2, 5):
        steps = []
        with pytest.raises(gpt.Interrupted) as caught:
            gpt.simulate(
                TASK, RECIPES[update], probe_every=3, checkpoint=file,
                on_step=lambda done, loss, steps=steps: steps.append(done),
                should_stop=lambda steps=steps, stop_after=stop_after: steps[-1] >= stop_after,
            )  # fmt: skip
        assert caught.value.step == stop_after
    assert comparable(gpt.simulate(TASK, RECIPES[update], probe_every=3, checkpoint=file)) == comparable(expected)


def test_a_run_killed_between_checkpoints_goes_on_from_the_last_one(tmp_path):
    file = tmp_path / "state.pt"

    def die(done, loss):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpt.simulate(TASK, RECIPES["muon"], checkpoint=file, checkpoint_every=3, on_step=die)
    assert torch.load(file, weights_only=True)["step"] == 6
    resumed = gpt.simulate(TASK, RECIPES["muon"], checkpoint=file)
    assert comparable(resumed) == comparable(gpt.simulate(TASK, RECIPES["muon"]))


def test_a_damaged_checkpoint_is_set_aside_and_the_run_done_from_the_start(tmp_path):
    file = tmp_path / "state.pt"
    file.write_bytes(b"not a checkpoint")
    with pytest.warns(UserWarning, match="cannot be read"):
        records = gpt.simulate(TASK, RECIPES["adamw"], checkpoint=file)
    assert comparable(records) == comparable(gpt.simulate(TASK, RECIPES["adamw"]))
    assert (tmp_path / "state.pt.damaged").exists()


def test_the_three_recipes_start_from_the_same_weights_and_see_the_same_batches():
    first = [gpt.simulate(TASK, recipe, probe_every=100)[1]["train_loss"] for recipe in RECIPES.values()]
    assert first[0] == first[1] == first[2]


@pytest.mark.parametrize("update, spectral", [("adamw", None), ("muon-out", {"mlp.down"}), ("muon", {"attention", "mlp"})])
def test_each_recipe_gives_muon_to_the_matrices_it_names(update, spectral):
    model = TASK.model()
    optimizer = RECIPES[update].optimizer(model)
    names = {id(p): n for n, p in model.named_parameters()}
    got = {names[id(p)] for g in optimizer.param_groups if g.get("momentum") is not None for p in g["params"]}
    if spectral is None:
        assert type(optimizer) is torch.optim.AdamW
    else:
        assert got == {n for n in names.values() if any(part in n for part in spectral)}
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == set(names)


def test_the_schedule_warms_up_stays_flat_and_decays_to_zero():
    recipe = gpt.Recipe("muon", 0.004, 0.02, steps=400)
    factors = [recipe.schedule(step) for step in range(400)]
    assert factors[0] == 1 / 20
    assert factors[19:241] == [1.0] * 222
    assert factors[320] == pytest.approx(0.5)
    assert 0 < factors[399] < 0.01


def test_training_lowers_the_loss_below_that_of_single_byte_frequencies():
    tokens = TASK._train.long()
    p = torch.bincount(tokens).double() / len(tokens)
    entropy = -(p[p > 0] * p[p > 0].log()).sum().item()
    final = gpt.simulate(TASK, gpt.Recipe("muon", 0.004, 0.02, steps=150), probe_every=1000)[-1]
    assert final["val_loss"] < entropy - 0.3
    assert final["val_loss"] == pytest.approx(np.mean(final["sequence_losses"]))


def test_a_diverging_run_stops_with_the_learning_rates_in_the_message():
    with pytest.raises(FloatingPointError, match="lower its learning rate"):
        gpt.simulate(TASK, gpt.Recipe("adamw", 1e30, steps=20))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("adamw", 0.0), "`adamw_lr`.*> 0; got 0.0"),
        (("muon", 0.1, -1.0), "`muon_lr`.*> 0; got -1.0"),
        (("muon", 0.1, math.inf), "`muon_lr`"),
        (("muon", 0.1), "`muon_lr` must be a learning rate > 0 for update 'muon'; got None"),
        (("sgd", 0.1), "`update`.*adamw, muon-out, muon; got 'sgd'"),
        (("adamw", 0.1, None, 0.0, 0), "`steps` must be >= 1; got 0"),
        (("adamw", 0.1, None, -0.1), "`weight_decay`"),
    ],
)
def test_recipes_out_of_range_are_refused_by_name_and_value(arguments, message, unchecked_types):
    with pytest.raises(ValueError, match=message):
        gpt.Recipe(*arguments)


def test_tuned_rates_are_the_best_of_the_recorded_sweep_and_never_at_its_edge():
    sweep = gpt.recorded_sweep()
    for mlp in ("relu2", "swiglu"):
        for update in ("adamw", "muon-out", "muon"):
            rates = gpt.tuned_rates(update, mlp)
            column = "adamw_lr" if update == "adamw" else "muon_lr"
            tried = sorted(row[column] for row in sweep if row["update"] == update and row["mlp"] == mlp)
            best = rates[0] if update == "adamw" else rates[1]
            assert tried[0] < best < tried[-1]


def test_the_sweep_moves_its_bracket_until_the_best_rate_is_inside():
    def measure(recipe):
        return abs(math.log((recipe.muon_lr or recipe.adamw_lr) / 0.08))

    rows = list(tune(measure, 10, "relu2"))
    best = {u: gpt.tuned_rates(u, "relu2", rows) for u in ("adamw", "muon-out", "muon")}
    assert best == {"adamw": (0.064, None), "muon-out": (0.064, 0.08), "muon": (0.064, 0.08)}
    assert len(rows) == len({(r["update"], r["adamw_lr"], r["muon_lr"]) for r in rows})


def test_paired_differences_cancel_what_windows_have_in_common():
    rng = np.random.default_rng(0)
    hardness, noise = rng.standard_normal(1000), 0.01 * rng.standard_normal(1000)
    got = gpt.paired_difference(hardness + 0.1 + noise, hardness)
    assert got.mean == pytest.approx(0.1, abs=4 * got.stderr)
    assert got.stderr == pytest.approx(0.01 / 1000**0.5, rel=0.1)


@pytest.mark.parametrize("mlp, share", [("relu2", 0.61845039018952), ("swiglu", 0.26778017241379354)])
def test_shares_of_the_published_gain_are_the_known_ones(mlp, share):
    losses = gpt.theory.PUBLISHED_LOSSES[mlp]
    assert gpt.share_of_gain(*(losses[u] for u in gpt.theory.EXPECTED_ORDER)) == pytest.approx(share)
    assert math.isnan(gpt.share_of_gain(1.0, 0.9, 1.1))
