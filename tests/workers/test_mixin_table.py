"""The table that tells where everything of the rollout gateway mixin is here tells the truth."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

import workers
from producer.contract import RolloutResult

TABLE = workers.__doc__ or ""

#: Attributes, methods, state keys and stages of the mixin and of the environment class below it, in verifiers 0.1.11.
NAMES = """
use_gateway init_gateway init_interception gateway_port _http_client _tunnels _tunnel_lock _resolve_gateway_url
_resolve_tunnel_local_addr _rollout_endpoint _gateway_post _gateway_get build_env_vars register_rollout
unregister_rollout
fetch_trajectory get_gateway_tunnel_url start_agent poll_job_completion wait_for_agent_completion _render_timing rollout
_tunnel_health_monitor teardown_gateway get_docker_image post_sandbox_setup post_rollout create_sandbox destroy_sandbox
run_command poll_interval timeout_seconds docker_image start_command cpu_cores memory_gb disk_size_gb gpu_count
environment_vars team_id advanced_configs labels max_turns max_seq_len
""".split()
KEYS = """
rollout_id gateway_url rollout_base_url tunnel_url tunnel_local_addr tunnel_id sandbox_id agent_completed
agent_exit_code agent_stdout agent_stderr agent_timed_out trajectory prompt completion is_truncated
stop_condition error timing
""".split()
STAGES = """
start register_rollout resolve_tunnel_local_addr start_tunnel create_sandbox start_agent wait_for_agent_completion
agent_completed fetch_trajectory tunnel_died finish
""".split()


@pytest.mark.parametrize("dotted", sorted(set(re.findall(r"`((?:workers|producer)\.[\w.]+)`", TABLE))))
def test_what_the_table_points_to_is_there(dotted: str) -> None:
    found: object = None
    for name in dotted.split("."):
        fields = getattr(found, "model_fields", {})
        if found is None:
            found = importlib.import_module(name)
        elif isinstance(found, ModuleType) and not hasattr(found, name):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = fields[name] if name in fields else getattr(found, name)


@pytest.mark.parametrize("name", [*NAMES, "background_job", "agent_start_time"])
def test_everything_of_the_mixin_is_in_the_table(name: str) -> None:
    assert re.search(rf"``{name}\b", TABLE)


def test_state_keys_are_fields_of_the_result() -> None:
    assert set(KEYS) <= set(RolloutResult.model_fields)
    assert all(f"``{key}``" in TABLE for key in KEYS)


def test_stages_are_logged_under_their_names() -> None:
    source = "".join((Path(workers.__file__).parent / name).read_text() for name in ("attempt.py", "rollout.py"))
    assert [stage for stage in STAGES if f'log(rollout, "{stage}"' not in source] == []
    assert all(f"``{stage}``" in TABLE for stage in STAGES)
