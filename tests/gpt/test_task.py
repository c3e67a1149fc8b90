import pytest
import torch

from specgrad.data import Text, read_text, shakespeare
from specgrad.gpt import SIZES, Decoder, Task, loss


def test_the_shipped_text_has_the_recorded_length_and_checksum():
    text = shakespeare()
    assert len(text.content) == 5_052_271
    assert text.sha256 == "54e895476c5b353447b8f0da8978c99fe42fdb3a5cc775e348ea6485e8aa0362"
    assert text.tokens().max() < 128


def test_batches_depend_on_seed_and_step_alone():
    assert torch.equal(Task(size="tiny").batch(3), Task(size="tiny").batch(3))
    assert not torch.equal(Task(size="tiny").batch(3), Task(size="tiny").batch(4))
    assert not torch.equal(Task(size="tiny").batch(3), Task(size="tiny", seed=1).batch(3))


def test_initial_weights_depend_on_the_seed_alone_and_leave_the_global_random_state_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = Task(size="tiny").model()
    assert torch.equal(torch.rand(2), expected)
    second = Task(size="tiny").model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_training_and_validation_windows_come_from_disjoint_parts_of_the_text():
    content = bytes([0] * 9000 + [1] * 1000)
    task = Task(Text("split", content), size="tiny")
    assert all(task.batch(step).max() == 0 for step in range(20))
    windows = task.validation_windows(100)
    assert windows.min() == 1
    assert windows.shape == (1000 // 65, 65)


def test_validation_windows_do_not_overlap():
    content = bytes(9000) + bytes(i % 250 for i in range(1000))
    windows = Task(Text("ramp", content), size="tiny").validation_windows(5)
    assert windows.shape == (5, 65)
    starts = [int(w[0]) for w in windows]
    assert len(set(starts)) == 5


@pytest.mark.parametrize("mlp, parameters", [("relu2", 4 * 128**2 + 8 * 128**2), ("swiglu", 4 * 128**2 + 3 * 336 * 128)])
def test_a_block_has_the_parameters_its_width_implies(mlp, parameters):
    model = Decoder(SIZES["small"], mlp)
    assert sum(p.numel() for p in model.blocks[0].parameters()) == parameters


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
def test_a_prediction_does_not_see_later_bytes_but_depends_on_their_order_before(mlp, positions):
    torch.manual_seed(0)
    model = Decoder(SIZES["tiny"], mlp, positions)
    ids = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 40:] = 7
    torch.testing.assert_close(model(ids)[:, :40], model(changed)[:, :40], atol=1e-5, rtol=0)
    swapped = ids.clone()
    swapped[0, [3, 20]] = ids[0, [20, 3]]
    assert not torch.allclose(model(ids)[:, -1], model(swapped)[:, -1], atol=1e-4)


def test_rotary_scores_depend_on_the_distance_of_positions_alone():
    attention = Decoder(SIZES["tiny"]).blocks[0].attention
    q = torch.randn(1, 1, 1, 32).expand(1, 1, 64, 32)
    k = torch.randn(1, 1, 1, 32).expand(1, 1, 64, 32)
    scores = (attention._rotate(q) @ attention._rotate(k).mT)[0, 0]
    torch.testing.assert_close(scores[5, 2], scores[40, 37], atol=1e-4, rtol=0)
    assert not torch.allclose(scores[5, 2], scores[5, 3], atol=1e-3)


def test_the_loss_of_uniform_logits_is_log_of_the_vocabulary():
    model = Decoder(SIZES["tiny"])
    torch.nn.init.zeros_(model.head.weight)
    assert loss(model, Task(size="tiny").batch(0)).item() == pytest.approx(5.545177, abs=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"size": "huge"}, "`size`.*tiny, small, medium, large; got 'huge'"),
        ({"mlp": "gelu"}, "`mlp`.*relu2, swiglu; got 'gelu'"),
        ({"positions": "alibi"}, "`positions`.*rotary, learned"),
        ({"batch_size": 0}, "`batch_size`.*>= 1; got 0"),
        ({"text": Text("short", b"to be or not to be")}, "`text`.*at least .* bytes; got 18"),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(arguments, message, unchecked_types):
    with pytest.raises(ValueError, match=message):
        Task(**arguments)


def test_the_shortest_text_that_is_accepted_is_the_one_the_message_names():
    with pytest.raises(ValueError, match=r"at least [0-9,]+ bytes") as caught:
        Task(Text("short", bytes(10)), size="tiny")
    least = int(str(caught.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    assert Task(Text("long enough", bytes(least)), size="tiny").batch(0).shape == (16, 65)


@pytest.mark.parametrize(
    "content, message", [(None, "no such file"), (b"", "must not be empty"), (b" \n\t ", "must not be empty")]
)
def test_a_missing_or_empty_file_is_refused(tmp_path, content, message):
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(path)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(ValueError, match="a folder"):
        read_text(tmp_path)
