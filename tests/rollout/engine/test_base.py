"""What every engine refuses."""

import pytest

from rft.setup.assembly import Job


def test_arguments_for_an_engine_that_takes_none_are_refused(tiny):
    config = tiny()
    config["rollout"]["engine_args"] = {"max_model_len": 5}
    with pytest.raises(ValueError, match=r"rollout.engine_args.max_model_len: HFEngine takes no arguments"):
        Job(config)
