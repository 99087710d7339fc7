"""Writes verdicts.json: what the oracle says of every candidate today."""

import json

from . import CASES, TABLE, judge

said = {}
for name, case in CASES.items():
    report = judge(case)
    said[name] = [report.verdict, *report.faults]
lines = ",\n".join(
    f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(row, ensure_ascii=False)}" for name, row in said.items()
)
TABLE.write_text("{\n" + lines + "\n}\n", "utf-8")
