"""What runs rollouts: the Celery worker, its pool, the flow, and the systems it touches.

::

    producer            Redis                       worker process                          elsewhere
    --------            -----                       --------------                          ---------
    submit ----------> record (the truth) <-------- claim, renew, commit  (jobs)
                       queue of wake-ups ---------> Celery consumer -> pool (pool)
                                                      | one event loop runs all rollouts
                                                      v
                                                    run_attempt (attempt) -> run_rollout (rollout)
                                                      register ------------------------->  gateway <---+
                                                      tunnel (tunnels.pool) ------------>  tunnel      | model calls
                                                      sandbox (sandboxes) -------------->  agent ------+
                                                      setup, agent, trajectory, score, clean up
    results <--------- result, batch's stream <---- first result wins  (results)
                       ledger <-------------------- sweep, orphans: what dead workers left is deleted

- `workers.rollout` is the flow, and where to begin; `workers.attempt` is what stands around one attempt, and
  `workers.fleet` the process: it claims, retries, hands over, and answers for its health.
- A rollout is held by a lease. `workers.leases` renews those of the process in a thread of its own, as long as the
  event loop makes progress; what is not renewed is run again by the `workers.sweep` of any other worker.
- A message is only a wake-up call: it is acknowledged at once (`workers.transport`), and a lost one is sent again.
- `workers.breaker` stops taking rollouts while a system fails, `workers.watchdog` ends agents that hang, and
  `workers.orphans` deletes what belongs to no living attempt. `workers.errors` says what happens when something fails.

Where everything of verifiers' ``RolloutGatewayMixin`` (0.1.11) is here. Its names are kept where the thing is the same:
state keys are fields of `producer.contract.RolloutResult`, stages are the ``stage`` of log lines.

=============================================  =======================================================================
the mixin                                      here
=============================================  =======================================================================
``use_gateway``                                `producer.contract.RolloutRequest.use_gateway`, else
                                               `workers.settings.WorkerSettings.use_gateway`
``init_gateway(gateway_port, timeout)``        `workers.settings.WorkerSettings.gateway_url`; `Deadlines.agent`
``init_interception``                          `workers.interception.InterceptingGateway`, by `workers.systems`
``gateway_port``                               the port of the gateway's URL
``_http_client``                               `workers.gateway.client.HttpGateway`
``_tunnels``, ``_tunnel_lock``                 `workers.tunnels.pool.TunnelPool`: one a process and gateway address
``_resolve_gateway_url``                       `workers.systems.WorkerSystems.of`; `producer.contract.GatewayUrl` cuts
                                               ``/v1``
``_resolve_tunnel_local_addr``                 `workers.rollout.run_rollout`, result field ``tunnel_local_addr``
``_rollout_endpoint``                          `workers.gateway.protocol.rollout_path`
``_gateway_post``, ``_gateway_get``            `workers.gateway.client.HttpGateway`
``register_rollout``, ``unregister_rollout``   `workers.gateway.protocol.Gateway.registered`: registers on entry,
                                               unregisters on exit, whatever happened in between
``fetch_trajectory``                           `workers.gateway.protocol.Gateway.fetch_trajectory`; of a failed attempt
                                               too: `workers.attempt.salvaged`
``build_env_vars``                             `workers.environment.Environment.build_env_vars`
``get_docker_image``                           `workers.environment.Environment.docker_image`
``post_sandbox_setup``                         `workers.environment.Environment.setup`
``post_rollout``                               `workers.environment.Environment.after`; rewards: ``score``
``get_gateway_tunnel_url``                     `workers.tunnels.base.TunnelProvider.lease`
``create_sandbox``, ``destroy_sandbox``        `workers.sandboxes.base.SandboxProvider.create`
``start_agent``                                `workers.sandboxes.base.Sandbox.start_job`
``poll_job_completion``                        `workers.sandboxes.base.BackgroundJob.wait`; all agents of a worker share
                                               polls: `workers.sandboxes.polls`
``wait_for_agent_completion``                  `workers.rollout.run_rollout`, phase ``agent``: the agent, its tunnel
                                               (`workers.tunnels.base.TunnelLease.broken`) and its deadline
``rollout``                                    `workers.rollout.run_rollout`
``_render_timing``                             `producer.contract.Timing`, and ``durations`` by phase
``teardown_gateway``                           `workers.systems.WorkerSystems`, on exit
``_tunnel_health_monitor``                     `workers.fleet.Fleet.check_tunnels`, the task ``rollouts.check_tunnels``
``run_command``                                `producer.contract.RolloutRequest.run_command`, or the environment's
``poll_interval``                              `workers.settings.WorkerSettings.poll_interval`, the longest one
``timeout_seconds``                            `producer.contract.RolloutRequest.deadlines`, one for each phase
``docker_image``, ``start_command``            `producer.contract.RolloutRequest.image`, ``start_command``
``cpu_cores``, ``memory_gb``, ``gpu_count``    `producer.contract.RolloutRequest.resources`; ``disk_size_gb`` is its
                                               ``disk_gb``
``environment_vars``                           `producer.contract.RolloutRequest.env`; secrets by name: ``secret_env``
``team_id``, ``advanced_configs``, ``labels``  `producer.contract.RolloutRequest.team_id`, ``advanced``, ``labels``
``max_turns``, ``max_seq_len``                 `producer.contract.RolloutRequest.max_turns`, ``max_seq_len``
=============================================  =======================================================================

State keys: ``rollout_id``, ``gateway_url``, ``rollout_base_url``, ``tunnel_url``, ``tunnel_local_addr``, ``tunnel_id``,
``sandbox_id``, ``agent_completed``, ``agent_exit_code``, ``agent_stdout``, ``agent_stderr``, ``agent_timed_out``,
``trajectory``, ``prompt``, ``completion``, ``is_truncated``, ``stop_condition``, ``error``, ``timing``: fields of the
result, under the same names. ``background_job`` and ``agent_start_time`` stay inside the attempt.

Stages: ``start``, ``register_rollout``, ``resolve_tunnel_local_addr``, ``start_tunnel``, ``create_sandbox``,
``start_agent``, ``wait_for_agent_completion``, ``agent_completed``, ``fetch_trajectory``, ``tunnel_died``, ``finish``:
`workers.rollout.run_rollout` logs each under its name.

Errors: ``vf.TunnelError`` is `workers.errors.TunnelError`, ``vf.InfraError`` one of `workers.errors.GatewayError` and
`workers.errors.SandboxError`, ``vf.Error`` is `workers.errors.RolloutError`; a result has them as
`producer.contract.ErrorInfo`. An agent's exit code other than 0, no error there, is `workers.errors.AgentError` here.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Build the app when Celery's own commands ask for it: ``celery -A workers worker``, ``beat``, ``inspect``."""
    if name == "celery":
        from workers.app import create_app

        app = create_app()
        globals()["celery"] = app
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
