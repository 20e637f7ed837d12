"""A reward model fitted with FSDP over gloo equals one fitted by one process."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alignment.artifacts.specs import ADAPTER
from alignment.config.trainer import TrainerConfig
from alignment.reward_model.model import HEAD, RewardModel
from alignment.trainer.trainer import Trainer
from tests.alignment.reward_model.conftest import make_dataset
from tests.support.reward_model_fit import fit_reward_model


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_two_ranks_fit_and_score_like_one(
    base_model: Path, reward_config: TrainerConfig, tmp_path: Path, full: bool
) -> None:
    config = reward_config.model_copy(update={"lora": None}) if full else reward_config
    assert config.reward_model is not None
    short = config.reward_model.model_copy(update={"min_steps": 10, "lr": 1e-3})
    config = config.model_copy(update={"reward_model": short})
    dataset = make_dataset(31, 20)
    (tmp_path / "dataset").write_bytes(pickle.dumps(dataset))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = Path(__file__).parent / "reward_model_ranks.py"
    (tmp_path / "out").mkdir()
    subprocess.run(
        [*torchrun, script, base_model, config.model_dump_json(), tmp_path / "out", tmp_path / "dataset"],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    one, other = (json.loads((tmp_path / "out" / f"rank-{rank}").read_text()) for rank in range(2))
    for result in (one, other):
        del result["metrics"]["seconds"]
    assert one == other

    single_rank = RewardModel(Trainer(base_model, config))
    metrics = fit_reward_model(single_rank, dataset)
    assert one["scores"] == pytest.approx(single_rank.score(dataset.replies), abs=1e-4)
    measured = metrics.keys() - {"seconds"}
    assert {name: one["metrics"][name] for name in measured} == pytest.approx(
        {name: metrics[name] for name in measured}, abs=1e-3
    )
    single_rank_path = single_rank.export(tmp_path / "alone", {}).path
    for name in (HEAD,) if full else (HEAD, ADAPTER):
        two_ranks, one_rank = load_file(tmp_path / "out" / "rm-1" / name), load_file(single_rank_path / name)
        assert two_ranks.keys() == one_rank.keys()
        for tensor in one_rank:
            torch.testing.assert_close(two_ranks[tensor], one_rank[tensor], atol=1e-4, rtol=0)
