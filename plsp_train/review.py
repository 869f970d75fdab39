"""Which training instances a person should look at first, and why.

The urgency of an instance is the sum of three signs, each between 0 and 1 and none of which needs true labels:

- contradiction: the probability of the predicted class if that class is not a candidate, otherwise 0;
- doubt: 1 - the probability of the label among the candidates;
- inconsistency: how often the label changed between epochs, relative to the instance whose label changed most often.
"""

import numpy as np

from plsp_train.results import Results

# The paper's confidence threshold τ0: a label below it counts as doubtful in the reasons.
DOUBTFUL = 0.75


def urgency(results: Results) -> np.ndarray:
    """(n,) float64 between 0 and 3."""
    contradiction = np.where(results.contradictions(), results.prediction_probability, 0.0)
    doubt = 1.0 - results.confidence.astype(np.float64)
    inconsistency = results.changes / max(1, results.changes.max(initial=0))
    return contradiction + doubt + inconsistency


def review_order(results: Results) -> np.ndarray:
    """(n,) int64: all instances, the most urgent first; ties keep the order of the file."""
    return np.argsort(-urgency(results), kind="stable")


def reasons(results: Results, index: np.ndarray) -> list[str]:
    """One sentence fragment for each of the instances: what speaks against its label."""
    contradictory = results.contradictions()
    return [_reason(results, int(i), bool(contradictory[i])) for i in index]


def _reason(results: Results, i: int, contradictory: bool) -> str:
    found = []
    if contradictory:
        prediction = results.class_names[results.prediction[i]]
        found.append(f"prediction {prediction} ({results.prediction_probability[i]:.2f}) is not a candidate")
    if results.confidence[i] < DOUBTFUL:
        classes, probabilities = results.candidates(i)
        first_two = zip(results.class_names[classes[:2]], probabilities[:2], strict=True)
        found.append("undecided between " + " and ".join(f"{name} ({value:.2f})" for name, value in first_two))
    if results.changes[i]:
        times = "once" if results.changes[i] == 1 else f"{results.changes[i]} times"
        found.append(f"label changed {times} during training")
    return "; ".join(found) or "no sign of a problem"
