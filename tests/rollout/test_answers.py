from rft.batch.trajectory import Finish, Segment, Trajectory
from rft.metrics import Metrics
from rft.rollout.answers import failure_of, log_episodes
from rft.rollout.environment.record import EpisodeRecord


def episode(**changes):
    counts = {"opening": 1, "turns": 2, "tool_calls": 3, "tool_failures": 1, "environment_s": 0.5, "agent": 0}
    record = EpisodeRecord([], **{**counts, "forks": [], "reward": None, "rewards": [], "failed": None, **changes})
    return record.trajectory([[Segment([1], False)]], Finish("stop", ""), {}, None)


def test_means_and_counts_over_episodes():
    metrics = Metrics()
    found = [episode(), episode(turns=4, forks=["tool, user: x", "user: y"]), episode(failed="deadline: f did not end")]
    log_episodes(found, metrics)
    numbers = metrics.reduce(lambda value: [value])
    assert numbers == {
        "episode/turns": 8 / 3, "episode/tool_calls": 3.0, "episode/tool_failures": 1.0, "episode/environment_s": 0.5,
        "episode/failed": 1 / 3, "episode/failed/deadline": 1, "episode/forks": 2, "episode/forks/tool_user": 1,
        "episode/forks/user": 1,
    }  # fmt: skip
    assert [failure_of(one) for one in found] == [None, None, "deadline: f did not end"]


def test_single_turns_log_nothing():
    metrics = Metrics()
    plain = Trajectory([Segment([1], False)], Finish("stop", ""), {})
    log_episodes([plain], metrics)
    assert metrics.reduce(lambda value: [value]) == {} and failure_of(plain) is None
