"""Real architectures from their configurations, randomly initialised, in the real trainers."""

import math

import pytest
import torch

from specgrad.linalg import nuclear_rank, stable_rank
from specgrad.optim import Muon, param_groups
from specgrad.probe import Probe, audit
from specgrad.probe.adapters import lightning_callback, trainer_callback

VOCABULARY = 64


def gpt2():
    t = pytest.importorskip("transformers")
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def llama():
    t = pytest.importorskip("transformers")
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def mixtral(implementation="eager"):
    t = pytest.importorskip("transformers")
    config = t.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config._experts_implementation = implementation
    return t.MixtralForCausalLM(config)


def vit():
    t = pytest.importorskip("transformers")
    return t.ViTForImageClassification(
        t.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=4,
            num_labels=5,
        )
    )  # fmt: skip


def resnet():
    t = pytest.importorskip("transformers")
    return t.ResNetForImageClassification(
        t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    )


def tokens(seed=0):
    ids = torch.randint(VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def images(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(8, 3, 16, 16, generator=generator), "labels": torch.arange(8) % 5}


MODELS = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "mixtral": (mixtral, tokens),
    "vit": (vit, images),
    "resnet": (resnet, images),
}

# Layers that see no verdict, and why; everything else has one.
WITHOUT = {"gpt2": {"transformer.wte": "tied", "lm_head": "tied"}}


@pytest.fixture(params=MODELS)
def architecture(request):
    make, batch = MODELS[request.param]
    torch.manual_seed(0)
    return request.param, make(), batch()


def test_every_weight_of_real_architectures_has_a_verdict_or_a_reason(architecture):
    name, model, batch = architecture
    with Probe(model, every=1, exact=True) as probe:
        model(**batch).loss.backward()
        records = probe.step()
    for record in records:
        expected = WITHOUT.get(name, {}).get(record["layer"])
        if expected is None:
            assert record["verdict"] != "undefined", (record["layer"], record["reason"])
        else:
            assert expected in record["reason"]
    covered = {record["parameter"] for record in records} | set(probe.skipped)
    assert {n for n, _ in model.named_parameters()} <= covered
    # Free parameters that nothing is multiplied with.
    unknown = [n for n, reason in probe.skipped.items() if "not known" in reason]
    assert all("cls_token" in n or "position" in n for n in unknown), unknown


def test_conv1d_of_gpt2_is_read_transposed():
    model, batch = gpt2(), tokens()
    with Probe(model, every=1, exact=True) as probe:
        model(**batch).loss.backward()
        found = {record["layer"]: record for record in probe.step()}
    record = found["transformer.h.0.mlp.c_fc"]
    assert (record["rows"], record["cols"]) == (128, 32)
    grad = model.transformer.h[0].mlp.c_fc.weight.grad
    assert record["nuclear_rank"] == pytest.approx(nuclear_rank(grad).item(), rel=1e-4)
    core = found["transformer.h.0.attn.c_proj"]["core_stable_rank"]
    assert core == pytest.approx(found["transformer.h.0.attn.c_attn"]["stable_rank"])


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_stacked_experts_are_measured_on_the_tokens_routed_to_them(implementation):
    torch.manual_seed(0)
    try:
        model, batch = mixtral(implementation), tokens()
        experts = model.model.layers[0].mlp.experts
        seen = []
        handle = experts.register_forward_pre_hook(lambda m, args: seen.append([a.detach() for a in args]))
        with Probe(model, every=1, exact=True) as probe:
            model(**batch).loss.backward()
            found = {record["layer"]: record for record in probe.step()}
    except (KeyError, NotImplementedError) as error:
        pytest.skip(f"{implementation} is not to be had: {error}")
    handle.remove()
    hidden, index = seen[0][:2]
    for e in range(4):
        rows = hidden.reshape(-1, 32)[(index == e).any(1)]
        record = found[f"model.layers.0.mlp.experts.gate_up_proj[{e}.gate]"]
        assert record["tokens"] == len(rows)
        assert record["stable_rank"] == pytest.approx(stable_rank(rows).item(), rel=1e-4)
        assert record["nuclear_rank"] == pytest.approx(nuclear_rank(experts.gate_up_proj.grad[e, :48]).item(), rel=1e-3)
        gate, up = (rows @ experts.gate_up_proj[e].mT).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        assert found[f"model.layers.0.mlp.experts.down_proj[{e}]"]["stable_rank"] == pytest.approx(
            stable_rank(inner.detach()).item(), rel=1e-4
        )


def test_an_expert_without_tokens_says_so():
    model, batch = mixtral(), tokens()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[3] = 0
        model.model.layers[0].mlp.gate.weight[:3] *= 1000
    with Probe(model, every=1, pattern="experts") as probe:
        model(**batch).loss.backward()
        found = {record["layer"]: record for record in probe.step()}
    record = found["model.layers.0.mlp.experts.down_proj[3]"]
    if record["tokens"] < 8:
        assert "routed to it" in record["reason"]
    assert sum(found[f"model.layers.0.mlp.experts.down_proj[{e}]"]["tokens"] for e in range(4)) == 2 * 8 * 16


def test_predicted_advantages_agree_with_line_searches_on_real_architectures(architecture):
    _, model, batch = architecture
    labels = batch["labels"]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    loss = "next_token" if "input_ids" in batch else "cross_entropy"
    optimizer = Muon(param_groups(model), lr=0.01)
    for _ in range(10):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    probe = Probe(model)
    pattern = "h.0|layers.0|layer.0|classifier|stages.0"
    predicted = probe.measure_advantage(inputs, labels, loss, draws=8, pattern=pattern)
    assert predicted
    for row in predicted:
        assert row["advantage"] > 0 or "gradient is zero" in row["reason"], row
    realised = probe.measure_gain(inputs, labels, loss, pattern=pattern)
    found = audit(predicted, realised)
    assert len(found.rows) >= 4
    assert found.median_factor < 2


def test_the_trainer_of_transformers_is_probed_over_accumulated_micro_batches(tmp_path):
    t = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = gpt2()
    callback = trainer_callback(every=2, exact=True)
    rows = [{key: value[i] for key, value in tokens().items()} for i in range(8)]
    arguments = t.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    optimizer = Muon(param_groups(model), lr=0.01)
    t.Trainer(model, arguments, train_dataset=rows, callbacks=[callback], optimizers=(optimizer, None)).train()
    report = callback.probe.report()
    assert sorted({record["step"] for record in report.records}) == [0, 2]
    assert {r["tokens"] for r in report.records if r["kind"] == "linear"} == {4 * 16}
    assert optimizer.last_step.updated["spectral"] > 0
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert "The condition holds on" in report.summary()


def test_a_lightning_module_is_probed_over_accumulated_micro_batches(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

        def training_step(self, batch, index):
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self):
            return Muon(param_groups(self.model), lr=0.01)

    torch.manual_seed(0)
    module = Module()
    callback = lightning_callback(every=2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 6)), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=4, accumulate_grad_batches=2, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    report = callback.probe.report()
    assert sorted({record["step"] for record in report.records}) == [0, 2]
    assert {record["tokens"] for record in report.records} == {8}
    assert all(math.isfinite(record["ratio"]) for record in report.records)
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    import specgrad.probe.adapters as adapters

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(adapters, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"specgrad\[hf\]"):
        trainer_callback()
    with pytest.raises(ModuleNotFoundError, match=r"specgrad\[lightning\]"):
        lightning_callback()
