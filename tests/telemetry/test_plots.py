import json

import numpy as np
import pytest

from tf_avgstrategy.telemetry import plots


def write(path, steps=8, replicas=2, **changes):
    """A file of rounds every 2 steps and an epoch every 4."""
    lines = [{"kind": "start", "replicas": replicas, "step": 0}]
    for step in range(2, steps + 1, 2):
        lines.append(
            {
                "kind": "round",
                "step": step,
                "time": 30.0 * step,
                "payload_bytes": 1_000_000,
                "divergence": 1 / step,
                "waiting_seconds": 0.01,
                "exchanging_seconds": 0.02,
                "computing_seconds": 0.03,
                "weights": [4.0, 4.0],
                "late": step % 4 // 2,
                "late_seconds": 0.005,
                **changes,
            }
        )
        if step % 4 == 0:
            logs = {"loss": 1 / step, "accuracy": 0.5, "val_loss": 2 / step}
            lines.append(
                {
                    "kind": "epoch",
                    "step": step,
                    "time": 30.0 * step,
                    "logs": logs,
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


class TestRead:
    def test_places_epochs_on_each_axis(self, tmp_path):
        run = plots.read(write(tmp_path / "run.jsonl"))
        where = run.positions(run.epochs)
        assert where["steps"].tolist() == [4, 8]
        # 2 - 2 / 2 = 1 MB for each round of 2 replicas.
        assert where["megabytes"].tolist() == [2.0, 4.0]
        assert where["minutes"].tolist() == [2.0, 4.0]
        assert run.values("loss").tolist() == [0.25, 0.125]
        assert np.isnan(run.values("nothing")).all()
        assert run.median_parts() == pytest.approx([0.01, 0.02, 0.03])

    def test_four_replicas_send_more(self, tmp_path):
        run = plots.read(write(tmp_path / "run.jsonl", replicas=4))
        assert run.positions(run.epochs)["megabytes"].tolist() == [3.0, 6.0]

    def test_steps_that_were_made_again_count_once(self, tmp_path):
        path = tmp_path / "run.jsonl"
        write(path, steps=6)
        first = path.read_text().splitlines()
        start = {"kind": "start", "replicas": 2, "step": 4}
        again = [json.loads(line) for line in first if '"step": 6' in line]
        again = [{**line, "time": 60.0} for line in again]
        lines = [*map(json.loads, first), start, *again]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run = plots.read(path)
        assert [r["step"] for r in run.rounds] == [2, 4, 6]
        # 120 s up to step 4, and 60 since it was resumed.
        assert run.rounds[-1]["time"] == 180.0

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "There must be a file.*run.jsonl"),
            ("", "the start of a training.*0 lines"),
            ("{", "must be JSON.*'{'"),
        ],
    )
    def test_rejects(self, tmp_path, text, message):
        path = tmp_path / "run.jsonl"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=message):
            plots.read(path)


class TestDraw:
    @pytest.mark.parametrize("is_comparison", [False, True])
    @pytest.mark.parametrize("count", [1, 3])
    def test_draws_a_picture(self, tmp_path, count, is_comparison):
        pytest.importorskip("matplotlib")
        runs = [
            plots.read(write(tmp_path / f"run{n}.jsonl", steps=4 * n + 4))
            for n in range(count)
        ]
        plots.draw(runs, tmp_path / "run.png", is_comparison=is_comparison)
        assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"

    def test_of_a_run_without_rounds_or_accuracy(self, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "run.jsonl"
        path.write_text('{"kind": "start", "replicas": 2, "step": 0}\n')
        plots.draw([plots.read(path)], tmp_path / "run.png")
        assert (tmp_path / "run.png").exists()
