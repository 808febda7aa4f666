"""The confined Python: the tool of gsm8k, the environment `code`, and what runs in it.

    sandbox.py        run(code): a process of its own, confined by the kernel
    sandbox_child.py  that process
    code.py           the environment: functions to write, judged by hidden tests
    code_tasks.py     its tasks, of the families in code_tasks.json
    code_style.py     its reviewer

Importing this package fills two tables: envs.ENVS with `code`, and envs.TOOLS with `python`.
"""
import envs


def python_for(cls):
    """Return the method `python` for an environment class, whose options have "unsafe_code".

    Raises UserError if this machine cannot confine a model's code.
    """
    # Only runs whose model writes Python need the sandbox.
    from extras.sandbox.sandbox import check_sandbox, run
    check_sandbox(cls.options["unsafe_code"])

    def python(self, code: str) -> str:
        """Run Python code, each time in a new process, and return what it prints.

        Args:
            code: Python code, for example "print(sum(range(10)))".
        """
        result = run(code, unsafe=self.options["unsafe_code"])
        return f"{result.output}{result.error}".strip() or "nothing was printed; use print"

    return python


envs.ENVS["code"] = "extras.sandbox.code:Code"
envs.TOOLS["python"] = python_for
