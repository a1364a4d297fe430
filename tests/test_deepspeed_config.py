"""DeepSpeed's config file as DeepSpeed reads it: with comments, and by sizes of batches that agree."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.deepspeed import config


def test_a_config_with_comments_is_read_as_deepspeed_does(tmp_path):
    pytest.importorskip("hjson", reason="DeepSpeed, which needs hjson, is not installed (make integrations)")
    path = tmp_path / "config.json"
    path.write_text(
        '{\n  // of each rank\n  "train_micro_batch_size_per_gpu": 4, # one\n  "bf16": {"enabled": true},\n}\n'
    )
    assert config.read_table(path) == {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}


@pytest.mark.parametrize("text", [None, "{", "{]}"], ids=["no file", "cut", "no JSON"])
def test_a_config_that_cannot_be_read_is_an_error_of_ours(text, tmp_path):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TrainingError, match="must be a file of JSON"):
        config.read_table(str(path))


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((32, 4, 2), (4, 2)),
        ((32, None, 2), (4, 2)),
        ((32, 4, None), (4, 2)),
        ((None, 4, 2), (4, 2)),
        ((None, 4, None), (4, 1)),
    ],
)
def test_sizes_of_batches_are_told_by_deepspeeds_rule(sizes, found, monkeypatch):
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 4)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert config.batch_sizes({name: size for name, size in zip(names, sizes, strict=True) if size}) == found


def test_sizes_of_batches_that_disagree_are_refused(monkeypatch):
    """4 x 2 samples on 4 ranks are no 24; DeepSpeed refuses them, too."""
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 4)
    table = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(TrainingError, match="got 24 for 4 x 2 x 4"):
        config.batch_sizes(table)
