"""The report of `pdserve up` on a terminal: a spinner for each step, with the time it takes."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from cli.child import Ending, Message
from cli.report import PlainReporter, Step


class RichReporter(PlainReporter):
    """Live lines for what goes on, plain ones above them for what is done."""

    def __init__(self, *, verbose: bool = False) -> None:
        super().__init__(verbose=verbose)
        self._console = Console(highlight=False)
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def message(self, name: str, message: Message) -> None:
        super().message(name, message)
        if self._progress and name in self._tasks:
            self._progress.update(self._tasks[name], detail=escape(self._steps[name].detail))

    def clear(self) -> None:
        super().clear()
        for name in list(self._tasks):
            self._remove(name)

    def show_step(self, name: str, step: Step) -> None:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[detail]}"),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        self._tasks[name] = self._progress.add_task(escape(step.text), total=None, detail="")

    def show_still(self, name: str, step: Step, seconds: float) -> None:
        """Nothing: the spinner says it."""

    def show_done(self, name: str, text: str, seconds: float) -> None:
        self._remove(name)
        self._console.print(f"[green]✓[/] {escape(text)} [dim]{seconds:.1f} s")

    def show_line(self, name: str, line: str) -> None:
        self._console.print(f"[dim]{name} |[/] {escape(line)}", soft_wrap=True)

    def died(self, ending: Ending, restart_in_s: float) -> None:
        self.failed(ending)
        for line in ending.reason:
            self.say(f"  {line}")
        self.say(f"  it is started again in {restart_in_s:g} s")

    def failed(self, ending: Ending) -> None:
        self._console.print(f"[red]✗[/] [bold]{ending.name} {ending.how}")

    def restarted(self, name: str) -> None:
        self._console.print(f"[green]✓[/] {name} is ready again")

    def _remove(self, name: str) -> None:
        assert self._progress is not None, "a step was shown"
        self._progress.remove_task(self._tasks.pop(name))
        if not self._tasks:
            # A live display without a task would redraw for as long as the system runs.
            self._progress.stop()
            self._progress = None
