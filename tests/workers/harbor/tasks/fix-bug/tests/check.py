import json
import os
import sys

sys.path.insert(0, "/app")


def passes(values, expected):
    from stats import mean

    try:
        return mean(values) == expected
    except ZeroDivisionError:
        return False


cases = [([], 0.0), ([1, 2, 3], 2.0), ([4], 4.0)]
assert len(cases) == int(os.environ["CASES"])
passed = sum(passes(*case) for case in cases)
print(json.dumps({"reward": float(passed == len(cases)), "cases_passed": passed, "cases": len(cases)}))
