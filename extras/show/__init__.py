"""What a run shows.

    run.py     Run overrides core.run.Run: bars, plan, notes, alarms, a full table, report.html
    notes.py   the words of a run, what it warns of, and what people then do: notes.json
    bars.py    episode_bar overrides core.config.episode_bar
    page.py    the page of runs, which page/ draws: python -m extras.show RUN... (recorded.py)
    examples.py episodes that are printed: --show_every, and one task before and after
    record.py  what every sampled token was worth: --record, tokens.jsonl
    flags.py   --record, --report_to, --show_every
    loggers.py those of --report_to: TensorBoard, Weights & Biases, trackio
    metrics.py what every logged number means (metrics.json): python -m extras.show --metrics
    hub.py     python lora.py info and push; card*.md are the words of its model card
"""
