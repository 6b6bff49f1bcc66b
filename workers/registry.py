"""Finds what a worker's settings name: environments from the allow-list, and providers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from producer.contract import RolloutRequest
from producer.door.config import ServedConfigError
from producer.door.wire import VERIFIERS
from workers.environment import CommandEnvironment, Environment, EpisodeEnvironment
from workers.errors import InvalidRolloutError
from workers.harbor.environment import HarborEnvironment
from workers.sandboxes.base import SandboxProvider
from workers.settings import WorkerSettings
from workers.tunnels.base import TunnelProvider


class ConfigurationError(Exception):
    """The worker's settings name something that does not exist; the message says which setting and what to do."""


class Environments:
    """The environments that this worker offers, by name. Nothing outside the allow-list is ever imported."""

    def __init__(self, allowed: Mapping[str, str], bundled: Mapping[str, Environment] | None = None) -> None:
        self._by_name: dict[str, Environment] = {"command": CommandEnvironment(), "harbor": HarborEnvironment()}
        self._by_name |= bundled or {}
        for name, target in allowed.items():
            found = load(target, setting="ROLLOUTS_ENVIRONMENTS")
            environment = found() if isinstance(found, type) else found
            if not isinstance(environment, Environment):
                raise ConfigurationError(f"ROLLOUTS_ENVIRONMENTS: {target} is not a workers.environment.Environment")
            self._by_name[name] = environment

    def get(self, name: str) -> Environment:
        """Return the environment of that name; raises `InvalidRolloutError` naming those that this worker has."""
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name))
            raise InvalidRolloutError(
                f"environment: {name[:100]!r} is not known to this worker, which has {known}; "
                "name it in the worker's ROLLOUTS_ENVIRONMENTS=NAME=MODULE:CLASS"
            )
        return self._by_name[name]

    def names(self) -> list[str]:
        """Return the names of all environments."""
        return sorted(self._by_name)

    async def aclose(self) -> None:
        """Release what environments hold for all their rollouts."""
        for environment in self._by_name.values():
            if isinstance(environment, EpisodeEnvironment):
                await environment.aclose()


class Secrets:
    """The worker's variables that requests may pass on to agents by name. Values are never logged or returned."""

    def __init__(self, allowed: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self._values = {name: environ[name] for name in allowed if name in environ}

    def of(self, request: RolloutRequest) -> dict[str, str]:
        """Return the values that ``request`` names; raises `InvalidRolloutError` naming what this worker lacks."""
        missing = [name for name in request.secret_env if name not in self._values]
        if missing:
            raise InvalidRolloutError(
                f"secret_env: {', '.join(missing)} is not offered by this worker; set the variable there "
                "and name it in ROLLOUTS_SECRET_ENV"
            )
        return {name: self._values[name] for name in request.secret_env}


def load(target: str, *, setting: str) -> object:
    """Import ``MODULE:ATTRIBUTE``; raises `ConfigurationError` naming the setting."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigurationError(f"{setting}: cannot import {module!r}: {error}; is it on PYTHONPATH?") from error
    except AttributeError:
        raise ConfigurationError(f"{setting}: module {module!r} has no {attribute!r}") from None


def check(settings: WorkerSettings) -> Environments:
    """Look whether all that ``settings`` name is there, without making any of it; raises `ConfigurationError`.

    Returns the environments, whose modules are imported for that.
    """
    if not settings.use_gateway and not settings.model_url:
        raise ConfigurationError(
            "ROLLOUTS_USE_GATEWAY is false, and there is no ROLLOUTS_MODEL_URL: name the model server to which this "
            "worker passes model calls, such as http://host:8000/v1"
        )
    for setting, own in (("sandbox_provider", "local"), ("tunnel_provider", "direct")):
        named = getattr(settings, setting)
        variable = f"ROLLOUTS_{setting.upper()}"
        if ":" in named:
            load(named, setting=variable)
        elif named not in {own, "prime"}:
            raise ConfigurationError(f"{variable}: {named!r} is not known; give {own}, prime, or MODULE:FACTORY")
    return Environments(settings.environments, _verifiers(settings) if settings.verifiers else None)


def _verifiers(settings: WorkerSettings) -> dict[str, Environment]:
    try:
        from workers.verifiers.environment import VerifiersEnvironment
    except ImportError as error:
        raise ConfigurationError(
            f"ROLLOUTS_VERIFIERS is set, but {error}: install verifiers, pip install 'rollout-fleet[verifiers]'"
        ) from None
    try:
        return {VERIFIERS: VerifiersEnvironment(settings.verifiers, settings.redis_url)}
    except ServedConfigError as error:
        raise ConfigurationError(f"ROLLOUTS_VERIFIERS: {error}") from None


def sandbox_provider(settings: WorkerSettings) -> SandboxProvider:
    """Make the sandbox provider that the settings name."""
    if settings.sandbox_provider == "local":
        from workers.sandboxes.local import LocalSandboxes

        return LocalSandboxes(root=settings.sandbox_dir, output_limit=settings.output_limit)
    if settings.sandbox_provider == "prime":
        from workers.sandboxes.prime import prime_sandboxes

        return prime_sandboxes(settings)
    factory = load(settings.sandbox_provider, setting="ROLLOUTS_SANDBOX_PROVIDER")
    return factory(settings)  # type: ignore[operator, no-any-return]


def tunnel_provider(settings: WorkerSettings, labels: tuple[str, ...] = ()) -> TunnelProvider:
    """Make the tunnel provider that the settings name; ``labels`` are for what it creates."""
    if settings.tunnel_provider == "direct":
        from workers.tunnels.direct import DirectTunnels

        return DirectTunnels()
    if settings.tunnel_provider == "prime":
        from workers.tunnels.prime import prime_tunnels

        return prime_tunnels(settings, labels=labels)
    factory = load(settings.tunnel_provider, setting="ROLLOUTS_TUNNEL_PROVIDER")
    return factory(settings)  # type: ignore[operator, no-any-return]
