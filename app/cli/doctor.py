"""`attune doctor`: check the installation and say how to mend it."""

from collections.abc import Iterator
from dataclasses import asdict

import httpx2
import typer

from app.cli.client import CommandError, drop_unset, load_api_key, service_url, tls_context
from app.cli.options import Home, Json
from app.cli.output import Row, print_object
from app.cli.up_record import read_running
from app.core.processes import port_error
from app.core.settings import Settings
from app.core.settings.loading import load_settings
from app.ops.diagnostics import CHECKS, Finding, Level, diagnose
from app.ops.start_checks import START_CHECKS

SIGNS = {Level.OK: "ok     ", Level.WARNING: "warning", Level.PROBLEM: "problem"}
TIMEOUT_SECONDS = 5.0


def doctor(home: Home = None, json: Json = False) -> None:
    """Check ports, API, keys, database, clock, broker, engine, model and disk. The exit status is 1 on a problem."""
    settings = load_settings().settings.replace(drop_unset(home=home))
    checks = (*CHECKS, *(check for check in START_CHECKS if check not in CHECKS))
    rows = [asdict(finding) for finding in (*check_ports(settings), *check_api(settings), *diagnose(settings, checks))]
    print_object(rows, json, _render)
    if any(row["level"] == Level.PROBLEM for row in rows):
        raise typer.Exit(1)


def _render(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        yield f"{SIGNS[row['level']]}  {row['check']}: {row['found']}"
        if row["fix"]:
            yield f"         {row['fix']}"
    counts = [sum(row["level"] == level for row in rows) for level in Level]
    yield "{} ok, {} warnings, {} problems".format(*counts)


def check_ports(settings: Settings) -> Iterator[Finding]:
    """Check that the ports are free, unless the service of this home has them."""
    if (running := read_running(settings)) is not None:
        yield Finding("ports", Level.OK, f"in use by `attune up` at {running.url} (process {running.pid})")
        return
    for name, host, port in (
        ("ATTUNE_SERVER__PORT", settings.server.host, settings.server.port),
        ("ATTUNE_ENGINE__PORT", settings.engine.host, settings.engine.port),
    ):
        if (reason := port_error(host, port)) is None:
            yield Finding("ports", Level.OK, f"{host}:{port} is free ({name})")
        else:
            fix = f"End the process that has it (`ss -ltnp` names it), or set {name}, unless it is an Attune role."
            yield Finding("ports", Level.WARNING, f"{host}:{port} is taken: {reason}", fix)


def check_api(settings: Settings) -> Iterator[Finding]:
    """Check that the API answers, is ready, and accepts the API key."""
    url = service_url(settings)
    try:
        key: str | None = load_api_key(settings)
        context = tls_context(settings)
    except (CommandError, ValueError, KeyError) as error:
        key, context = None, None
        fix = str(error).removeprefix("attune: ")
        yield Finding("credentials", Level.WARNING, "the command line has no API key", f"{fix[0].upper()}{fix[1:]}.")
    try:
        with httpx2.Client(base_url=url, timeout=TIMEOUT_SECONDS, verify=context or True, trust_env=False) as api:
            ready = api.get("/readyz")
            headers = {"authorization": f"Bearer {key}"}
            policies = None if key is None else api.get("/v1/policies", headers=headers)
    except httpx2.TransportError as error:
        expected = settings.url is not None or read_running(settings) is not None
        level = Level.PROBLEM if expected else Level.WARNING
        fix = "Check the address and the certificate's authority: ATTUNE_URL, ATTUNE_CA_FILE."
        yield Finding("api", level, f"{url} does not answer: {error}", fix if expected else "`attune up` starts it.")
        return
    if ready.status_code == 200:
        yield Finding("api", Level.OK, f"{url} is ready")
    else:
        fix = "`attune status` and `attune logs` say more; an engine may take minutes to start."
        yield Finding("api", Level.PROBLEM, f"{url} is not ready: {_message(ready)}", fix)
    if policies is None:
        return
    if policies.status_code == 401:
        fix = "Set ATTUNE_API_KEY to a key of this service: `attune keys create` by an admin."
        yield Finding("credentials", Level.PROBLEM, f"{url} refuses the API key: {_message(policies)}", fix)
    else:
        yield Finding("credentials", Level.OK, "the service knows the API key")


def _message(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}, not an answer of Attune"
