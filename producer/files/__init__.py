r"""The files of a batch: where its tasks come from, and where its results go.

Tasks
    One JSON object a line, with any fields of a request; what all tasks share can be given as options of
    ``rollouts run``::

        {"prompt": "What is 6 times 7?", "answer": 42, "environment": "math", "deadlines": {"agent": 600}}

    Less obvious ones: ``queue`` names the pool of workers that is to run it, those whose ``ROLLOUTS_QUEUES`` has that
    name (else ``rollouts``); ``priority`` 0 is served first and 9 last; ``retry_agent`` runs an agent again that
    exits with an error (else that is its result); ``max_turns`` below 1 means no limit; ``start_command`` is the
    sandbox's main process and ``run_command`` the agent; ``sampling_params`` win over what the agent asks for;
    ``max_seq_len`` cuts the recorded tokens, not what the agent gets; ``deadlines`` are seconds per phase; ``labels``
    go to the sandbox.
Other sources
    Standard input (``-``), a Parquet or Arrow file, the folder of a Hugging Face dataset saved with ``save_to_disk``,
    or a folder of such files (``--split train`` chooses; extra ``parquet``)::

        rollouts run gsm8k/ --split train --template 'Solve: {question}' --map answer=solution \
            --model M --out results.parquet

    ``--map FIELD=COLUMN`` fills a field, ``--template TEXT`` or ``@FILE`` makes the prompt (``{column}``;
    ``{{name}}`` for literal braces). Columns with a field's name keep it; with either option others are left out. A
    null is a field left out.
Checks
    The whole file is checked before anything is submitted: a wrong line is named by its number and field.
Results
    One JSON object a line, or, with the suffix ``.parquet``, a folder of Parquet parts that readers take for one
    dataset: one row a rollout, ``prompt_ids``, ``completion_ids``, ``completion_logprobs`` and masks as one list per
    step (`producer.files.schema`). In either form each result is on disk when it comes, whatever kills the run.
Resume
    Ctrl-C cancels what is in flight and keeps what is done. ``--resume`` runs the rest: it matches results to tasks
    by ``example_id`` (by default the line's number) and sample, and refuses tasks that changed since. What a killed
    run had submitted runs on: ``--resume`` writes what ended meanwhile, waits for what still runs, and submits only
    the others.
Exit status
    0 when all completed, 1 when some did not or the run broke off, 2 for bad usage or no Redis, 130 after a Ctrl-C.
    ``--json`` prints the summary as one JSON object.
"""
