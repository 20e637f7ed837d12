"""Commands that run processes of the service: up, serve, engine, worker, beat, trainer; and `attune db upgrade`."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import httpx2
import typer
import uvicorn

from app.cli import client
from app.cli.console import describe_console
from app.cli.options import Home
from app.cli.projects import run_in_transaction
from app.cli.up_record import hold_record, require_no_running
from app.core.connection_limit import ConnectionLimit, TrustedProxies
