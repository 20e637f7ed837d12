"""The layers: import contracts, cycles, and which module may name which library."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from alembic.command import check

from app.core.migrate import alembic_config
from app.core.settings import REPOSITORY
from tests.architecture.source_tree import PACKAGES, Module, find_cycles, find_modules, import_graph, package_graph

TORCH_LIBRARIES = ("torch", "transformers", "peft", "sglang", "vllm")


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_modules_have_no_import_cycle() -> None:
    """Imports in functions and under TYPE_CHECKING count."""
    assert find_cycles(import_graph(find_modules(*PACKAGES))) == []


def test_packages_have_no_import_cycle() -> None:
    """Imports in functions and under TYPE_CHECKING count. A package is the first two parts of a module's name."""
    assert find_cycles(package_graph(import_graph(find_modules(*PACKAGES)))) == []


def test_cycles_are_found(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    sources = {
        "a": "import one.b",
        "b": "def f():\n    from one import c",
        "c": "from one.a import x",
        "d": "import one.a",
    }
    for name, source in sources.items():
        (tmp_path / "one" / f"{name}.py").write_text(source)
    graph = import_graph(find_modules("one", root=tmp_path))
    assert graph["one.b"] == {"one.c"}
    assert find_cycles(graph) == [["one.a", "one.b", "one.c"]]
    assert find_cycles({"x": {"y"}, "y": set()}) == []
    assert find_cycles({"x": {"x"}}) == [["x"]]
    assert package_graph({"p.q.r": {"p.s.t", "p.q.u"}}) == {"p.q": {"p.s"}}


def test_app_starts_without_torch() -> None:
    program = "import sys, app.main, app.cli.main; print([name for name in sys.argv[1:] if name in sys.modules])"
    command = [sys.executable, "-c", program, *TORCH_LIBRARIES]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_modules_with_routes_are_imported_by_main_only() -> None:
    """What others need of them is in views or services. The console's pages are an application of their own."""
    modules = [module for module in find_modules("app") if not module.name.startswith("app.console.")]
    with_routes = {module.name for module in modules if "APIRouter(" in module.source} - {"app.main"}
    importers = {
        target: name
        for name, targets in import_graph(find_modules(*PACKAGES)).items()
        for target in with_routes & targets
        if name != "app.main"
    }
    assert len(with_routes) > 20 and importers == {}


def test_no_handler_calls_another() -> None:
    def find_handlers(module: Module) -> set[str]:
        functions = (node for node in ast.walk(module.tree) if isinstance(node, ast.AsyncFunctionDef))
        return {node.name for node in functions if any("router." in ast.unparse(each) for each in node.decorator_list)}

    def find_calls(module: Module) -> set[str]:
        calls = (node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call))
        return {function.id for function in calls if isinstance(function, ast.Name)}

    modules = find_modules("app")
    assert sum(len(find_handlers(module)) for module in modules) > 100
    called = {module.name: find_handlers(module) & find_calls(module) for module in modules}
    assert {name: names for name, names in called.items() if names} == {}


def test_only_the_lock_makes_a_locked_policy() -> None:
    makers = {module.name for module in find_modules("app", "workers", "demo") if "LockedPolicy(" in module.source}
    assert makers == {"app.policies.locks"}


def test_routes_of_an_engine_are_in_its_package_only() -> None:
    def names_routes(module: Module) -> bool:
        texts = ("import sglang", "from sglang", "import vllm", "from vllm", "/load_lora_adapter")
        return any(text in module.source for text in texts)

    modules = find_modules("app", "alignment", "workers", "migrations")
    packages = {module.name.rpartition(".")[0] for module in modules if names_routes(module)}
    assert packages == {"app.inference.sglang", "app.inference.vllm"}


def test_client_imports_nothing_of_the_service() -> None:
    client = find_modules("clients/python")
    forbidden = re.compile(r"^\s*(?:from|import) (?:app|alignment|workers|demo)\b", re.MULTILINE)
    assert client and not [str(module.path) for module in client if forbidden.search(module.source)]


def test_only_the_settings_read_the_environment() -> None:
    readers = {
        str(module.path)
        for module in find_modules("app")
        if any(text in module.source for text in ("os.environ[", "os.environ.get", "getenv"))
    }
    assert readers == {"app/cli/environments.py", "app/datasets/imports.py"}, (
        "they pass variables on to other processes"
    )


def test_migrations_create_the_tables_of_the_models(database_url: str) -> None:
    check(alembic_config(database_url))
