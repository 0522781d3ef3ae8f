"""The subcommands of `python -m measure` that run workloads and show results; one module each, with `main(arguments) -> text`."""
