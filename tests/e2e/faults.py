"""The test of each row of the table of faults in docs/runs.md."""

import re

TEST = re.compile(r"([^:]+)::(\w+)(?:\[(.+)\])?")  # file, function, and the kind that parametrizes it
STOPPED, KILLS, DAMAGE = "e2e/test_stopped_run.py", "e2e/test_kills.py", "e2e/test_damage.py"
FOLDER, DIVERGED, WATCHDOG = "train/folder/test_run_folder.py", "train/test_diverged.py", "remote/test_watchdog.py"
LOST, NOT_LOST = (
    f"{DAMAGE}::test_of_a_damaged_checkpoint_the_one_before_is_used",
    f"{DAMAGE}::test_other_damage_loses_no_step",
)
REFUSED = f"{DAMAGE}::test_damage_that_a_person_has_to_mend_is_named"
RANKS = f"{WATCHDOG}::test_the_others_end_and_name_the_rank_and_the_collective"

FAULTS = {
    "SIGTERM, SIGINT, SIGUSR1 or SIGHUP": f"{STOPPED}::test_a_run_stopped_five_times_ends_as_the_whole_run",
    "the terminal is closed, or the reader of the output ends": (
        "train/test_stop.py::test_a_terminal_that_is_closed_stops_the_run_and_takes_its_output"
    ),
    "a signal to one rank of several": f"{STOPPED}::test_all_ranks_stop_after_the_same_step",
    "a second signal": "train/test_stop.py::test_a_second_signal_ends_a_process_that_waits_outside_of_python",
    "max_time is over": f"{STOPPED}::test_a_run_stopped_five_times_ends_as_the_whole_run",
    "the process is killed, in any phase of a step": f"{KILLS}::test_a_kill_in_any_phase_of_a_step_loses_nothing",
    "killed at any write of a checkpoint": (
        "train/checkpoint/test_checkpoints_killed.py::test_after_a_kill_at_any_write_a_whole_checkpoint_is_read"
    ),
    "one rank of two is killed while a checkpoint is written": (
        f"{KILLS}::test_a_rank_of_two_that_is_killed_in_a_save_loses_nothing"
    ),
    "killed again while it resumes": f"{KILLS}::test_a_kill_while_a_killed_run_resumes_loses_nothing",
    "killed while a checkpoint that is not kept is removed": (
        "train/checkpoint/test_checkpoints.py::test_what_a_kill_left_is_pruned"
    ),
    "killed between report.html and result.json": (
        "e2e/test_trainer_resume.py::test_a_run_that_was_killed_after_its_last_checkpoint_only_ends"
    ),
    "a sweep is started again after some of its jobs": (
        "modes/test_train.py::test_a_sweep_that_is_started_again_does_not_repeat_what_has_finished"
    ),
    "the number of ranks changes, twice": (
        "e2e/test_changing_ranks.py::test_two_one_and_two_ranks_use_every_position_once"
    ),
    "the same command twice at the same time": f"{FOLDER}::test_a_run_in_use_is_refused",
    "a lock of a dead process": "train/folder/test_run_lock.py::test_a_killed_process_holds_nothing",
    "a key that changes the weights differs": (
        f"{FOLDER}::test_the_message_names_the_key_both_values_and_the_override"
    ),
    "a bit of the weights in a checkpoint is flipped": f"{LOST}[a flipped bit in the weights]",
    "a bit of state.json is flipped, or the file is truncated or missing": f"{LOST}[a flipped bit in the state]",
    "a bit of an export is flipped": f"{LOST}[a flipped bit in the export]",
    "a bit of MANIFEST.json is flipped": f"{LOST}[a flipped bit in the manifest]",
    "a file of a checkpoint is truncated or missing": f"{LOST}[truncated weights]",
    "a checkpoint is an empty folder": f"{LOST}[an empty folder]",
    "a checkpoint has the name of another step, or tensors of another one beside its own": (
        f"{LOST}[weights of another checkpoint beside its own]"
    ),
    "a checkpoint of a run with another config": f"{LOST}[a checkpoint of a run with another seed]",
    "all checkpoints are damaged": f"{REFUSED}[all checkpoints are damaged]",
    "latest is missing, leads nowhere, or is a folder": f"{NOT_LOST}[latest is a folder]",
    "a file that is no checkpoint is in checkpoints/ or in a checkpoint": (
        f"{NOT_LOST}[a file where the next checkpoint will be]"
    ),
    "ref_logprobs.pt (reference.precompute) is damaged or missing": (
        "e2e/test_reference.py::test_what_another_model_said_is_enough_to_go_on"
    ),
    "a power cut while a checkpoint, the config or the result is written": (
        "train/checkpoint/test_checkpoints_disk.py::"
        "test_a_power_cut_at_any_time_leaves_a_checkpoint_whole_or_without_its_name"
    ),
    "checkpoints is a file, or a link to a disk that is not there": (
        f"{REFUSED}[checkpoints is on a disk that is not there]"
    ),
    "config.yaml is empty or damaged beside checkpoints": f"{REFUSED}[an empty config]",
    "metrics.jsonl is cut short": f"{NOT_LOST}[half of the metrics]",
    "a line of metrics.jsonl, worst_tokens.jsonl or a file of trajectories/ is damaged": (
        f"{NOT_LOST}[a damaged line of each log]"
    ),
    "a checkpoint has another content than this version reads, and its hashes are right": (
        f"{DAMAGE}::test_a_checkpoint_of_another_version_is_named"
    ),
    "a value in state.json is edited, with the right hashes: another one of the same type": (
        "train/checkpoint/test_saved_state.py::test_another_value_of_the_same_type_is_read"
    ),
    "the same: one of another type, or an entry that is new or missing": (
        "e2e/test_damage.py::test_a_state_in_which_any_value_has_another_type_is_refused_before_it_is_used"
    ),
    "result.json is empty or damaged": f"{NOT_LOST}[an empty result]",
    "the disk is full while a checkpoint is written": (
        f"{DAMAGE}::test_a_full_disk_while_a_checkpoint_is_written_ends_nothing"
    ),
    "the disk is full at the last checkpoint": (
        f"{DAMAGE}::test_a_full_disk_at_the_end_leaves_the_last_checkpoint_in_the_fallback"
    ),
    "the same, and the fallback is null or full too": (
        f"{DAMAGE}::test_after_a_full_disk_at_the_end_the_same_command_writes_the_last_checkpoint"
    ),
    "the disk is full while a line of a log is written": (
        "logger/test_log.py::test_a_disk_that_is_full_for_a_while_loses_no_line"
    ),
    "the run folder is removed or renamed": (
        f"{DAMAGE}::test_a_run_folder_that_is_renamed_ends_the_run_at_its_next_checkpoint"
    ),
    "the report, a logger, the table at the end or the closing of an engine fails": (
        f"{DAMAGE}::test_an_error_after_the_last_step_is_a_warning_and_the_run_has_its_result"
    ),
    "a loss or gradient is not finite, faults.nonfinite=stop": (
        f"{DIVERGED}::test_stop_saves_the_rows_and_names_columns_rows_and_cures"
    ),
    "the same with faults.nonfinite=skip": (
        f"{DIVERGED}::test_a_run_that_skips_equals_one_in_which_the_update_never_was"
    ),
    "the same with faults.nonfinite=drop_rows": (
        f"{DIVERGED}::test_a_run_that_drops_a_row_equals_one_in_which_it_never_was"
    ),
    "the same, and no row is the cause, or the second try is not finite either": (
        f"{DIVERGED}::test_an_update_that_no_row_explains_is_skipped"
    ),
    "more than faults.max_skipped updates of a model in a row": (
        f"{DIVERGED}::test_one_more_than_max_skipped_in_a_row_stops_a_resumed_run_too"
    ),
    "a weight is not finite after an update": (
        f"{DIVERGED}::test_a_weight_that_is_not_finite_names_the_last_checkpoint"
    ),
    "a score is not finite after algorithm.shaping, whatever faults.nonfinite is": (
        f"{DIVERGED}::test_a_score_that_is_not_finite_after_shaping_stops_with_every_policy"
    ),
    "a measured KL is not finite, with skip": (
        "algorithm/test_algorithm.py::test_controllers_are_steered_by_their_own_kl"
    ),
    "a rank raises an error": f"{RANKS}[raise]",
    "the same with mode=evaluate, generate, doctor or replay": (
        "modes/test_model.py::test_a_rank_that_fails_in_any_mode_ends_the_others_which_name_it[generate]"
    ),
    "the process of a rank ends without an error, for example after kill -9": f"{RANKS}[kill]",
    "a rank gives no sign of life for faults.dead_after_s: its machine is gone, or its process does not run": (
        f"{RANKS}[stop]"
    ),
    "a rank does not start, or ends before the others have found it": (
        "test_distributed.py::test_a_rank_that_does_not_start_is_an_error_with_the_address"
    ),
    "a rank ends while the others make a group of ranks": (
        f"{WATCHDOG}::test_a_rank_that_is_killed_before_a_group_is_made_is_found_without_the_timeout_of_torch"
    ),
    "a rank lives, and others wait for it for faults.collective_timeout_s": (
        f"{WATCHDOG}::test_a_rank_that_hangs_is_named_with_its_place_after_the_long_timeout"
    ),
    "the same in the forward or backward pass of a sharded model, in a gather of weights, or while a checkpoint is "
    "written": f"{WATCHDOG}::test_a_rank_that_hangs_in_work_that_needs_all_ranks_is_named[forward]",
    "a rank is slow": f"{WATCHDOG}::test_a_rank_that_is_slow_ends_nothing",
    "memory cannot be allocated, on a device or on the host": (
        "train/test_memory.py::test_the_term_is_that_of_the_plan_of_the_run"
    ),
}
