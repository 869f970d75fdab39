"""The report: what it says, what it leaves out, and that a browser opens it."""

import base64
import json
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from browser import PROGRAM, Browser
from plsp_train.cli import main as train
from plsp_train.report.charts import Chart, Series, line_chart
from plsp_train.report.classes import count_per_class
from plsp_train.report.cli import main
from plsp_train.report.confusion import MOST_CLASSES_IN_TABLE
from plsp_train.report.markup import Html, element
from plsp_train.report.png import data_uri, thumbnail
from plsp_train.report.wording import count, enumeration, percent
from plsp_train.results import load_results, save_results
from small_runs import run
from synthetic_runs import Synthetic, make_results, write_json, write_run

UNLABELED = Synthetic(picture_shape=None, true_labels=False, test_set=False, validation=False)


class Page(HTMLParser):
    """Text, headings and attributes of a page; every element must be closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)
            if self.open[-1] in ("h1", "h2", "h3", "h4"):
                self.headings.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def attributes(self, tag: str, name: str) -> list[str]:
        return [found[name] or "" for kind, found in self.elements if kind == tag and name in found]


def report(*runs: Path, options: tuple[str, ...] = ()) -> Page:
    out = runs[0].parent / "report.html"
    assert main([*map(str, runs), "-o", str(out), *options]) == 0
    return Page(out)


def change_json(path: Path, **entries: object) -> None:
    write_json(path, json.loads(path.read_text()) | entries)


# ------------------------------------------------------------------------------------------------------------- content


def test_a_complete_run_has_every_part(tmp_path) -> None:
    page = report(write_run(tmp_path / "birds"))
    assert page.headings == [
        *("Partial-label training report", "birds", "Warnings", "Curves", "Classes", "Confusion", "Test set"),
        *(
            "Training set",
            "Instances",
            "Most confident",
            "Most ambiguous",
            "Contradictions",
            "Review first",
            "Settings",
        ),
    ]
    assert "PLSP with the network mlp was trained for 6 epochs on birds.npz: 60 images in 4 classes" in page.text
    titles = re.findall(r"<svg[^>]*><title>([^<]*)</title>", page.source)
    assert titles == [
        "F1 on the test set",
        "Signs without true labels",
        "Labels used in training",
        "Loss and its terms",
        "Confidence threshold of each class",
        "Labelled set of each class",
    ]


def test_figures_are_those_of_the_run(tmp_path) -> None:
    directory = write_run(tmp_path / "run")
    change_json(directory / "summary.json", micro_f1=0.8125, disambiguation_accuracy=0.9876, covering_rate=1.0)
    page = report(directory)
    assert "micro-F1 0.812 (mean of the last 6 epochs" in page.text
    assert "98.8 % of the labels that it chose for the training instances are correct." in page.text
    assert "For 100 % of the held-out instances the predicted class is a candidate" in page.text


def test_what_is_not_known_is_left_out(tmp_path) -> None:
    page = report(write_run(tmp_path / "run", UNLABELED))
    assert page.headings[2:] == ["Warnings", "Curves", "Classes", "Review first", "Settings"]
    assert "True labels are not known" in page.text
    for absent in ("micro-F1", "purity", "F1 on the test set", "precision", "✓", "covering rate", "nan", "None "):
        assert absent not in page.text
    assert "labelled confidence" in page.text, "a label-free sign takes the place of the purity"


def test_methods_without_a_labeled_set_have_no_thresholds(tmp_path) -> None:
    page = report(write_run(tmp_path / "run", replace(UNLABELED, method="proden")))
    assert "PRODEN with the network mlp" in page.text
    for absent in ("labelled", "threshold", "Dotted lines"):
        assert absent not in page.text


def test_an_unfinished_run_says_so(tmp_path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "summary.json").unlink()
    edit_last_line(directory, labeled_per_class=[5, 0, 5, 0])
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 7, "los')  # being written
    page = report(directory)
    assert "This run is not finished: the figures are those of epoch 6." in page.text
    assert "2 classes (1 and 3) without instances in the labelled set" in page.text, "their names are not known yet"
    assert page.headings[2:] == ["Warnings", "Curves", "Classes", "Settings"]


def test_a_run_without_a_complete_epoch(tmp_path) -> None:
    directory = write_run(tmp_path / "run")
    for name in ("summary.json", "results.npz", "metrics.jsonl", "ambiguity.json"):
        (directory / name).unlink()
    page = report(directory)
    assert "This run is not finished: no epoch is complete yet." in page.text
    assert page.headings[2:] == ["Warnings", "Settings"]


def test_text_from_the_data_is_escaped(tmp_path) -> None:
    hostile = '<script>alert("1")</script>'
    kind = Synthetic(
        class_names=(hostile, 'a"b', "c&d", "</td>"), names=(hostile,) * 60, config=(("dataset", hostile),)
    )
    directory = write_run(tmp_path / "<b>run", kind)
    change_json(directory / "summary.json", warnings=[hostile])
    page = report(directory, write_run(tmp_path / "other"))
    assert page.source.count("<script>") == 1, "that of the page itself"
    assert "<b>run" not in page.source
    for text in (hostile, "c&d", "</td>", "<b>run"):
        assert text in page.text


def test_counts_per_class_match_the_results() -> None:
    results = make_results(Synthetic())
    counts = count_per_class(results)
    for number in range(4):
        members = [i for i in range(len(results)) if results.label[i] == number]
        assert counts.chosen[number] == len(members)
        assert counts.candidate[number] == sum(number in results.candidates(i)[0] for i in range(len(results)))
        outside = [i for i in members if results.prediction[i] not in results.candidates(i)[0]]
        assert counts.contradicted[number] == len(outside)
        assert counts.correct is not None
        assert counts.correct[number] == sum(results.true_label[i] == number for i in members)


def test_confusion_of_many_classes_is_a_picture(tmp_path) -> None:
    names = tuple(f"class {number}" for number in range(MOST_CLASSES_IN_TABLE + 1))
    page = report(write_run(tmp_path / "run", Synthetic(class_names=names, picture_shape=None, num_instances=200)))
    (test, training) = [alt for alt in page.attributes("img", "alt") if "diagonal" in alt]
    assert test.startswith(f"Test set of {len(names)} classes")
    assert training.startswith("Training set")


def test_most_frequent_confusion_comes_first(tmp_path) -> None:
    directory = write_run(tmp_path / "run")
    results = load_results(directory / "results.npz")
    confusion = np.diag([90, 100, 100, 100])
    confusion[0, 2] = 10
    save_results(directory / "results.npz", replace(results, test_confusion=confusion))
    assert "airplane taken for cat : 10 (10.0 % of the class)" in report(directory).text


def test_pictures_are_grouped_by_what_they_show(tmp_path) -> None:
    directory = write_run(tmp_path / "run", Synthetic(num_instances=400))
    results = load_results(directory / "results.npz")
    (confident, ambiguous, contradictory) = re.split("Most ambiguous|Contradictions", report(directory).source)[:3]
    rows = [list(map(int, re.findall(r'alt="row (\d+),', part))) for part in (confident, ambiguous, contradictory)]
    several, contradicts = np.diff(results.offsets) > 1, results.contradictions()
    decided = results.confidence[several & ~contradicts]
    assert results.confidence[rows[0]] == pytest.approx(np.sort(decided)[::-1][:8])
    assert results.confidence[rows[1]] == pytest.approx(np.sort(decided)[:8])
    assert contradicts[rows[2][: min(8, contradicts.sum())]].all()


# ------------------------------------------------------------------------------------------------------------ warnings


def edit_last_line(directory: Path, **entries: object) -> None:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | entries)
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def edit_results(directory: Path, **arrays: object) -> None:
    results = load_results(directory / "results.npz")
    save_results(directory / "results.npz", replace(results, **arrays))


def without_prediction(directory: Path) -> None:
    prediction = load_results(directory / "results.npz").prediction
    edit_results(directory, prediction=np.where(prediction == 2, 3, prediction))


def without_test_prediction(directory: Path) -> None:
    edit_results(directory, test_confusion=np.array([[5, 0, 0, 0], [5, 0, 0, 0], [0, 0, 5, 0], [0, 0, 0, 5]]))


@pytest.mark.parametrize(
    ("edit", "warning"),
    [
        (without_prediction, "1 class (cat) that the model predicts for no training instance."),
        (without_test_prediction, "1 class (bird) that the model predicts for no test instance."),
        (
            lambda run: change_json(run / "summary.json", label_agreement=0.5),
            "50.0 % of the chosen labels still changed",
        ),
        (lambda run: edit_last_line(run, micro_f1=0.2), "in the last epoch. Curves"),
        (lambda run: change_json(run / "summary.json", warnings=["cats are rare"]), "Cats are rare."),
        (lambda run: (run / "results.npz").unlink(), "This run has no results.npz"),
    ],
)
def test_each_sign_of_trouble_is_a_warning(tmp_path, edit: Callable[[Path], None], warning: str) -> None:
    directory = write_run(tmp_path / "run", Synthetic(num_instances=400))
    assert warning not in report(directory).text
    edit(directory)
    assert warning in report(directory).text


# ------------------------------------------------------------------------------------- several runs, cross-validation


def test_several_runs_are_compared(tmp_path) -> None:
    first = write_run(tmp_path / "plsp", Synthetic(config=(("lr", 0.1),)))
    second = write_run(tmp_path / "proden", Synthetic(method="proden", seed=1, config=(("lr", 0.5),)))
    page = report(first, second)
    assert [text for text in page.headings if text in ("Comparison", "plsp", "proden")] == [
        "Comparison",
        "plsp",
        "proden",
    ]
    comparison = page.source.partition('id="comparison"')[2].partition("</section>")[0]
    heads = re.findall(r"<th[^>]*>([^<]+)</th>", comparison)
    assert heads[:5] == ["run", "method", "lr", "seed", "micro-F1"], "settings that differ"
    assert comparison.count("<polyline") == 2 * 5 + 1, "five common metrics, and one of PLSP alone"
    colours = re.findall(r'class="key (s\d)"[^>]*></i><span>proden<', comparison)
    assert set(colours) == {"s2"}, "a run has the same colour in all charts"


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path) -> None:
    runs = [write_run(tmp_path / parent / "run") for parent in ("a", "b")]
    page = report(*runs)
    assert page.headings[1:3] == ["Comparison", str(runs[0])]


def test_a_cross_validation_is_summarised(tmp_path) -> None:
    scores = [0.7, 0.8, 0.9]
    for number, score in enumerate(scores, 1):
        fold = write_run(
            tmp_path / "cv" / f"fold{number}", Synthetic(seed=number, config=(("folds", 4), ("fold", number)))
        )
        change_json(fold / "summary.json", micro_f1=score, warnings=["rare"] * (number == 2))
    (tmp_path / "cv" / "folds.json").write_text("{}")
    page = report(tmp_path / "cv")
    assert "was cross-validated on birds.npz with 4 folds. Finished so far: 3." in page.text
    assert "micro-F1 0.800 ± 0.100" in page.text
    titles = [text for text in page.texts if re.match(r"fold \d", text)]
    assert titles[-3:] == [
        "fold 1",
        "fold 2 – 1 warning",
        "fold 3",
    ]


# -------------------------------------------------------------------------------------------------------- real runs


def test_a_run_of_the_trainer(tmp_path) -> None:
    assert run(tmp_path / "digits", "--validation-fraction", "0.1") == 0
    page = report(tmp_path / "digits")
    assert "Instances" in page.headings
    assert "PLSP with the network mlp was trained for 4 epochs on digits: 1,437 images in 10 classes" in page.text
    summary = json.loads((tmp_path / "digits" / "summary.json").read_text())
    assert f"On 360 test instances it reaches micro-F1 {summary['micro_f1']:.3f}" in page.text
    assert f"approximated accuracy is {100 * summary['approximated_accuracy']:.1f} %" in page.text


def test_a_cross_validation_of_the_trainer(tmp_path) -> None:
    labels = np.arange(60) % 3
    features = np.eye(3)[labels] + np.random.default_rng(0).normal(size=(60, 3))
    candidates = np.eye(3)[labels] + np.eye(3)[(labels + 1) % 3] > 0
    np.savez(tmp_path / "own.npz", features=features, candidates=candidates, labels=labels)
    settings = ["--dataset", str(tmp_path / "own.npz"), "--folds", "2", "--method", "cc", "--epochs", "2"]
    assert train([*settings, "--out", str(tmp_path / "cv")]) == 0
    summaries = [json.loads((tmp_path / "cv" / fold / "summary.json").read_text()) for fold in ("fold1", "fold2")]
    scores = [summary["micro_f1"] for summary in summaries]
    page = report(tmp_path / "cv")
    assert "was cross-validated on own.npz with 2 folds. The figures are means" in page.text
    assert f"micro-F1 {np.mean(scores):.3f} ± {np.std(scores, ddof=1):.3f}" in page.text


# -------------------------------------------------------------------------------------------------- the command line


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "is not the directory of a run: it has no config.json"),
        (write("config.json", "{"), "config.json: "),
        (write("config.json", "[]"), "config.json: it must hold a table"),
        (write("summary.json", '{"micro_f1": 0.'), "summary.json: "),
        (write("metrics.jsonl", '{"epoch": 1}\n{"epo\n'), "metrics.jsonl, line 2: "),
        (write("metrics.jsonl", '{"loss": 1}\n'), "metrics.jsonl, line 1: it must hold the metrics of an epoch"),
        (write("metrics.jsonl", '{"epoch": 1, "thresholds": [0.5]}\n'), "thresholds has 1 entries, but there are 4"),
        (write("results.npz", "PK"), "results.npz"),
        (lambda directory: (directory / "config.json").write_bytes(b"\xff"), "config.json: "),
    ],
)
def test_a_broken_run_is_a_one_line_error(tmp_path, capsys, damage: Callable[[Path], object], message: str) -> None:
    directory = write_run(tmp_path / "run")
    damage(directory)
    assert main([str(directory), "-o", str(tmp_path / "report.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plsp_train.report: error: ")
    assert message in error
    assert str(directory) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such directory: nowhere"),
        (["run", "../{parent}/run"], "are the same directory"),
        (["run", "-o", "report.pdf"], "-o must name an .html file, got report.pdf"),
        (["run", "--review", "-1"], "--review must be at least 0, got -1"),
        (["run", "-o", "folder.html"], "folder.html"),
    ],
)
def test_invalid_arguments_are_one_line_errors(
    tmp_path, capsys, monkeypatch, arguments: list[str], message: str
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([argument.format(parent=tmp_path.name) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_review_lists_as_many_instances_as_asked(tmp_path) -> None:
    directory = write_run(tmp_path / "run")
    assert "7 instances of 60, most urgent first." in report(directory, options=("--review", "7")).text
    assert "Review first" not in report(directory, options=("--review", "0")).headings


def test_an_earlier_report_is_replaced_and_nothing_else_is_left(tmp_path, capsys) -> None:
    directory = write_run(tmp_path / "run")
    before = sorted(directory.iterdir())
    out = tmp_path / "new" / "report.html"
    for _ in range(2):
        assert main([str(directory), "-o", str(out)]) == 0
    assert list(out.parent.iterdir()) == [out]
    assert sorted(directory.iterdir()) == before
    assert str(out) in capsys.readouterr().out


def test_the_command_imports_no_heavy_packages(tmp_path) -> None:
    directory = write_run(tmp_path / "run")
    arguments = [str(directory), "-o", str(tmp_path / "report.html")]
    code = f"import sys; from plsp_train.report.cli import main; main({arguments!r}); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = ran.stdout.splitlines()[-1].split()
    assert "plsp_train.report.page" in imported
    assert not {"torch._dynamo", "sklearn", "torchvision", "matplotlib", "scipy"} & set(imported)


# ---------------------------------------------------------------------------------------------------------- its pieces


def test_markup_escapes_text_and_attributes() -> None:
    inner = element("b", "<&>")
    assert element("p", "a < b", inner, None, title='"x"', class_="c", hidden=True, id=None) == Html(
        '<p title="&quot;x&quot;" class="c" hidden>a &lt; b<b>&lt;&amp;&gt;</b></p>'
    )


def decode(uri: str) -> np.ndarray:
    png = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    width, height, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    channels = {0: 1, 2: 3, 6: 4}[colour]
    place, data = 8, b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        assert struct.unpack(">I", png[place + 8 + length : place + 12 + length])[0] == zlib.crc32(kind + content)
        data += content if kind == b"IDAT" else b""
        place += 12 + length
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_holds_the_pixels(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(5, 7, channels)).astype(np.uint8)
    assert (decode(data_uri(pixels)) == pixels).all()


@pytest.mark.parametrize(
    ("shape", "shown"),
    [((3, 8, 9), (8, 9, 3)), ((1, 28, 28), (28, 28, 1)), ((2, 8, 8), (8, 8, 1)), ((3, 200, 300), (50, 75, 3))],
)
def test_thumbnails_keep_the_proportions(shape: tuple[int, ...], shown: tuple[int, ...]) -> None:
    picture = np.full(shape, 77, np.uint8)
    assert thumbnail(picture).shape == shown
    assert (thumbnail(picture) == 77).all()


def test_charts_survive_constant_and_single_values() -> None:
    for points in ([(1, 1.0)], [(1, 0.0), (2, 0.0)], [(3, 1e-9), (4, 1e-9)], [(1, -5.0), (400, 1e6)]):
        drawn = line_chart(Chart("title", [Series("name", points)]))
        assert drawn is not None
        coordinates = [float(text) for text in re.findall(r'(?:cx|cy|x1|y1)="([^"]+)"', drawn)]
        assert all(0 <= coordinate <= 380 for coordinate in coordinates)
    assert line_chart(Chart("title", [Series("name", [])])) is None


def test_many_classes_are_drawn_as_an_area_between_the_highest_and_the_lowest() -> None:
    series = [Series(f"class {place}", [(1, place), (2, place / 2)]) for place in range(40)]
    drawn = line_chart(Chart("thresholds", series, most_coloured=6))
    assert drawn is not None
    assert drawn.count("<polyline") == 2
    assert drawn.count("<polygon") == 1
    assert "highest (class 39)" in drawn
    assert "lowest (class 0)" in drawn


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 %"), (1e-5, "<0.1 %"), (0.5, "50.0 %"), (0.99999, ">99.9 %"), (1.0, "100 %")]
)
def test_only_all_and_none_are_rounded_to_100_and_0_percent(value: float, text: str) -> None:
    assert percent(value).replace("\N{NO-BREAK SPACE}", " ") == text


def test_counts_and_lists_are_put_into_words() -> None:
    assert (count(1, "class"), count(1200, "class"), count(2, "fold")) == ("1 class", "1,200 classes", "2 folds")
    assert enumeration(["a"]) == "a"
    assert enumeration(["a", "b", "c"]) == "a, b and c"
    assert enumeration(list("abcdefg")) == "a, b, c, d and 3 more"


# ---------------------------------------------------------------------------------------------------------- a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs Chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Everything at once, with names that are long and have no spaces."""
    directory = tmp_path_factory.mktemp("runs")
    names = tuple("n" * 80 + str(number) for number in range(60))
    long = Synthetic(class_names=("c" * 60, "bird", "cat", "deer"), names=names, picture_shape=(3, 32, 48))
    runs = [write_run(directory / "images", long), write_run(directory / "vectors", replace(UNLABELED, method="cc"))]
    classes = tuple(f"class {number}" for number in range(40))
    for number in (1, 2):
        write_run(
            directory / "cv" / f"fold{number}", Synthetic(class_names=classes, picture_shape=None, num_instances=200)
        )
    report(*runs, directory / "cv")
    return directory / "report.html"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_without_errors_and_fits_the_window(browser: Browser, page: Path, width: int) -> None:
    browser.messages.clear()
    browser.open(page, width)
    browser.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("[...document.images].filter((image) => !image.naturalWidth).length") == 0
    assert browser.messages == []


CONTRAST = """
(() => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = (colour) => {
    const [red, green, blue] = colour.match(/[\\d.]+/g).map(Number);
    return 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue);
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" || colour.includes("/") ? behind(element.parentElement) : colour;
  };
  const contrast = (element) => {
    const pair = [luminance(getComputedStyle(element).color), luminance(behind(element))].sort((a, b) => a - b);
    return (pair[1] + 0.05) / (pair[0] + 0.05);
  };
  const selectors = ["body", ".note", ".tiles .note", "h1", "a", ".warnings li", "thead th", ".against", "summary"];
  return Math.min(...selectors.flatMap((name) => [...document.querySelectorAll(name)].map(contrast)));
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, 1280, dark)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(21, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert browser.evaluate(CONTRAST) >= 4.5


def test_clicking_a_column_sorts_the_classes(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    values = "[...document.querySelectorAll('#run1-classes tbody tr')].map((row) => Number(row.cells[1].dataset.value))"
    click = "document.querySelectorAll('#run1-classes thead button')[1].click()"
    original = browser.evaluate(values)
    browser.evaluate(click)
    assert browser.evaluate(values) == sorted(original, reverse=True)
    browser.evaluate(click)
    assert browser.evaluate(values) == sorted(original)
    browser.evaluate(click)
    assert browser.evaluate(values) == original


def test_pointing_at_a_chart_shows_the_values_of_that_epoch(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    history = [json.loads(line) for line in (page.parent / "images" / "metrics.jsonl").read_text().splitlines()]
    move = """(() => {
      const chart = document.querySelector("#run1-curves .chart"), svg = chart.querySelector("svg");
      const box = svg.getBoundingClientRect(), x = box.left + (42 + (372 - 42) * 2 / 5) / 380 * box.width;
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: box.top + 50 }));
      return [...chart.querySelectorAll(".at, .legend b")].map((element) => element.textContent);
    })()"""
    at, micro, macro = browser.evaluate(move)
    assert at == "epoch 3"
    assert [float(micro), float(macro)] == pytest.approx([history[2]["micro_f1"], history[2]["macro_f1"]], abs=0.001)
