"""Metrics by role over HTTP, the dashboard's queries, and the live page in Chromium under load."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from axe_core_python.selenium import Axe
from precache_sglang.launch.process import ServerError, ServerProcess
from prometheus_client.parser import text_string_to_metric_families
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

ARGS = ["--skip-tokenizer-init", "--max-total-tokens", "9000", "--max-running-requests", "8"]
ARGS += ["--max-loras-per-batch", "6", "--chunked-prefill-size", "256"]
ARGS += ["--precache-max-neutral-wait", "50", "--log-level", "warning"]
# A role's name is whatever the loader of its adapter says.
EVIL = "<img src=x onerror=\"document.title='owned'\">&amp;{{role}}"
DASHBOARD = Path(__file__).parents[1] / "launch/assets/grafana/precache.json"
SOURCES = ("shared", "own", "replayed", "computed")


@pytest.fixture(scope="module")
def server(model: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    args = [*ARGS, "--enable-metrics", "--precache-metrics-roles", "3"]
    with ServerProcess(model, adapters, args) as running:
        load(running, EVIL, adapters["plan"])
        yield running


def load(server: ServerProcess, name: str, path: Path) -> None:
    answer = server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    assert answer["success"], answer


def generate(server: ServerProcess, prompt: list[int], role: str | None, **more: Any) -> Any:
    sampling = {"max_new_tokens": more.pop("output", 8), "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "lora_path": role, "sampling_params": sampling, **more}
    return server.post("/generate", body)


@contextmanager
def under_load(server: ServerProcess, roles: list[str | None]) -> Iterator[list[str]]:
    """Trajectories of all roles until the block ends; yields what went wrong."""
    stop = threading.Event()
    problems: list[str] = []

    def client(seed: int) -> None:
        rng = random.Random(seed)
        context: list[int] = []
        while not stop.is_set():
            if len(context) > 1000:
                context = []
            context += rng.choices(range(5, 250), k=rng.choice((8, 40, 150)))
            salt = None if seed < 2 else f"tenant-{seed}"
            try:
                answer = generate(
                    server, context, rng.choice(roles), output=rng.choice((8, 40)), cache_salt=salt
                )
            except ServerError as error:
                problems.append(str(error)[:300])
                return
            context = context + answer["output_ids"]
            stop.wait(rng.expovariate(3))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield problems
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# -- metrics ---------------------------------------------------------------------


def exported(server: ServerProcess) -> dict[str, list[Any]]:
    """The samples of ``/metrics`` by name; at least a second after the last change."""
    time.sleep(2.2)
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def by_role(samples: list[Any], **labels: str) -> dict[str, float]:
    return {
        sample.labels["role"]: sample.value
        for sample in samples
        if labels.items() <= sample.labels.items()
    }


def test_every_role_is_counted_and_neutral_passes_are_not(
    server: ServerProcess, adapters: dict[str, Path]
) -> None:
    before = server.state()
    assert set(before["roles"]) == {"plan", "action", EVIL, "(base)"}  # SGLang warms up
    prompt = random.Random(1).choices(range(5, 250), k=300)
    generate(server, prompt, "plan", output=20)
    generate(server, prompt, "action", output=10)
    generate(server, prompt, None, output=1)
    for name in ("one-more", "and-more"):  # beyond --precache-metrics-roles
        load(server, name, adapters["action"])
        generate(server, prompt, name, output=5)
    state = server.wait_for_backlog()
    assert state["total_neutral"] > before["total_neutral"]

    roles = state["roles"]
    assert set(roles) == {"plan", "action", EVIL, "(base)", "other"}
    assert [roles[name]["requests"] for name in ("plan", "action", "other")] == [1, 1, 2]
    assert [roles[name]["output"] for name in ("plan", "action", "other")] == [20, 10, 10]
    assert roles["(base)"]["output"] == before["roles"]["(base)"]["output"] + 1
    for name in ("plan", "action"):
        assert roles[name]["ttft"]["count"] == 1
        assert roles[name]["itl"]["count"] == roles[name]["output"] - 1
        assert sum(roles[name][source] for source in SOURCES) == 300
    assert roles["plan"]["computed"] == 300 and roles["action"]["shared"] == 299
    for source in SOURCES:
        assert sum(row[source] for row in roles.values()) == state[f"total_{source}"]

    samples = exported(server)
    state = server.state()
    for source in SOURCES:
        wanted = {name: row[source] for name, row in roles.items()}
        assert by_role(samples["precache_prompt_tokens_total"], source=source) == wanted
    for name, row in roles.items():
        for kind in ("ttft", "itl"):
            assert by_role(samples[f"precache_{kind}_seconds_count"])[name] == row[kind]["count"]
            (last,) = [
                sample.value
                for sample in samples[f"precache_{kind}_seconds_bucket"]
                if sample.labels["role"] == name and sample.labels["le"] == "+Inf"
            ]
            assert last == row[kind]["count"]
    assert sum(s.value for s in samples["precache_neutral_total"]) == state["total_neutral"]
    assert {s.labels["schedule"] for s in samples["precache_neutral_total"]} == {"auto"}
    lr_bytes = by_role(samples["precache_lr_bytes"])
    assert lr_bytes["plan"] == state["lr"]["plan"]["bytes"] > 0
    assert lr_bytes["other"] == sum(state["lr"][n]["bytes"] for n in ("one-more", "and-more"))
    for name in ("tree_nodes", "base_tokens", "backlog_tokens", "provisional_tokens"):
        assert [s.value for s in samples[f"precache_{name}"]] == [state[name]]
    for name in ("one-more", "and-more"):
        server.post("/unload_lora_adapter", {"lora_name": name})


def test_ttft_is_what_a_client_sees_but_for_the_way_back(server: ServerProcess) -> None:
    """Waits included: all requests come at once."""

    def mean(state: dict[str, Any]) -> tuple[int, float]:
        ttft = state["roles"]["action"]["ttft"]
        return ttft["count"], ttft["count"] * (ttft["mean_ms"] or 0)

    count, total = mean(server.state())
    rng = random.Random(2)
    seen = []

    def ask(_: int) -> None:
        body = {
            "input_ids": rng.choices(range(5, 250), k=400),
            "lora_path": "action",
            "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        }
        start = time.perf_counter()
        for event in server.stream("/generate", body):
            if event["meta_info"]["completion_tokens"] >= 1:
                seen.append((time.perf_counter() - start) * 1e3)
                break

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    server.wait_for_backlog()
    new_count, new_total = mean(server.state())
    assert new_count == count + 6
    measured = (new_total - total) / 6
    client = sum(seen) / 6
    assert 0.6 * client < measured < client + 1


def test_the_dashboard_asks_for_what_the_server_exports(server: ServerProcess) -> None:
    generate(server, [7, 8, 9], "plan")
    samples = exported(server)
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 20
    for query in queries:
        promql_parser.parse(query.replace("$__rate_interval", "1m"))
        selectors = re.findall(r"((?:precache_|sglang:)\w+)\{([^}]*)\}", query)
        assert selectors, query
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
        for name, matchers in selectors:
            assert name in samples, f"{name} is not exported: {query}"
            wanted = grouped | set(re.findall(r"(\w+)\s*=", matchers))
            assert wanted <= samples[name][0].labels.keys(), query
        found = {label for text in re.findall(r'"([\w|]+)"', query) for label in text.split("|")}
        assert not found - set(SOURCES), "values that are asked for by name"
    (variable,) = [v for v in dashboard["templating"]["list"] if v["name"] == "model"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
    assert label in samples[name][0].labels
    ours = {name for name in samples if name.startswith("precache_")}
    asked = " ".join(queries)
    for name in ours:
        family = re.sub(r"_(bucket|count|sum|total|created)$", "", name)
        assert family in asked, f"{name} is on no panel"


# -- the picture -----------------------------------------------------------------


def test_a_view_stays_small_and_its_history_is_sent_once(server: ServerProcess) -> None:
    prompts = [[first, 3, 4, 5] for first in range(5, 245)] + [
        [first, 6] for first in range(5, 245)
    ]
    server.post(
        "/generate",
        {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
    )
    time.sleep(1.1)
    view = server.get("/precache/view")
    assert view["gauges"]["tree_nodes"] > len(view["tree"]["nodes"]) == 300
    assert len(json.dumps(view)) < 256_000
    assert [role["name"] for role in view["roles"]][:3] == ["plan", "action", EVIL]
    serials = [sample["serial"] for sample in view["history"]]
    assert serials == sorted(set(serials))
    later = server.get(f"/precache/view?since={serials[-1]}")["history"]
    assert all(sample["serial"] > serials[-1] for sample in later)
    with pytest.raises(ServerError, match=r"\b4\d\d\b"):
        server.get("/precache/view?since=yesterday")
    server.post("/flush_cache?timeout=30")


def test_many_viewers_share_one_picture_a_second(server: ServerProcess) -> None:
    start = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        views = list(pool.map(lambda _: server.get("/precache/view")["time"], range(64)))
    assert len(set(views)) <= 2 + (time.monotonic() - start)


# -- the page ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("Chromium and chromedriver are missing: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--no-proxy-server", "--window-size=1360,1700"),
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(driver)) as chrome:
        yield chrome


def until(browser: webdriver.Chrome, what: Any, timeout: float = 30) -> Any:
    wait = WebDriverWait(browser, timeout, 0.1, [StaleElementReferenceException])
    return wait.until(lambda _: what())


def text(browser: webdriver.Chrome, selector: str) -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def use_theme(browser: webdriver.Chrome, theme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_the_page_is_alive_under_load(
    server: ServerProcess, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    roles = ["plan", "action", EVIL, None]
    with under_load(server, roles) as problems:
        browser.get(f"{server.url}/precache/")
        until(browser, lambda: text(browser, "#state") == "Live")
        until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, "[role=treeitem]")) > 10)
        until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#chart-ttft .mark"))
        for kind in ("neutral", "running"):
            until(
                browser, lambda kind=kind: browser.find_elements(By.CSS_SELECTOR, f".kind.{kind}")
            )
        until(
            browser,
            lambda: browser.find_elements(By.CSS_SELECTOR, ".kind.owed, .kind.provisional"),
        )

        before = text(browser, "#prompt-legend"), text(browser, "#updated")
        until(
            browser,
            lambda: (
                text(browser, "#prompt-legend") != before[0]
                and text(browser, "#updated") != before[1]
            ),
        )

        # Names from outside are text, and nothing else is asked for but the view.
        assert EVIL in [
            cell.text or cell.get_attribute("textContent")
            for cell in browser.find_elements(By.CSS_SELECTOR, "#roles .role-name > :last-child")
        ]
        assert browser.find_elements(By.TAG_NAME, "img") == []
        assert browser.title == "precache: rebaseown"
        fetched = browser.execute_script(
            "return performance.getEntriesByType('resource').map(entry => entry.name)"
        )
        assert {url.split("?")[0] for url in fetched} == {f"{server.url}/precache/view"}

        for theme in ("light", "dark"):
            use_theme(browser, theme)
            for width in (1360, 480):
                browser.set_window_size(width, 1700)
                time.sleep(1.2)
                wide = "return document.documentElement.scrollWidth - innerWidth"
                assert browser.execute_script(wide) <= 0, f"{width} px scroll sideways"
                browser.save_screenshot(str(tmp_path / f"{theme}-{width}.png"))
            browser.set_window_size(1360, 1700)
            # Contrast, names, roles, ARIA: the rules of WCAG that a program can check.
            found = Axe().run(browser)["violations"]
            assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found] == []
        assert problems == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def focused(browser: webdriver.Chrome) -> Any:
    return browser.switch_to.active_element


def test_the_tree_is_walked_by_keyboard(server: ServerProcess, browser: webdriver.Chrome) -> None:
    server.wait_for_backlog()
    server.post("/flush_cache?timeout=30")
    for tail in ([11, 12], [13, 14]):  # two adapter-free passes, each published in one piece
        generate(server, [*range(100, 150), *tail], None, output=1)
    browser.get(f"{server.url}/precache")
    items = "#tree [role=treeitem]"
    until(browser, lambda: len(browser.find_elements(By.CSS_SELECTOR, items)) == 3)
    browser.find_element(By.CSS_SELECTOR, f"{items}[tabindex='0']").send_keys("")

    def press(*keys: str) -> dict[str, Any]:
        for key in keys:
            focused(browser).send_keys(key)
        element = focused(browser)
        assert element.get_attribute("role") == "treeitem"
        names = ("aria-level", "aria-expanded", "aria-label", "aria-posinset")
        return {name: element.get_attribute(name) for name in names}

    top = press(Keys.HOME)
    assert (top["aria-level"], top["aria-expanded"]) == ("1", "true")
    assert "50 tokens" in top["aria-label"] and "base KV neutral" in top["aria-label"]
    assert "fed by no adapter" in top["aria-label"] and "rows of plan, action" in top["aria-label"]
    assert press(Keys.ARROW_DOWN)["aria-level"] == "2"
    assert press(Keys.END)["aria-posinset"] == "2"
    assert press(Keys.ARROW_LEFT) == top
    assert press(Keys.ARROW_LEFT)["aria-expanded"] == "false"
    assert len(browser.find_elements(By.CSS_SELECTOR, items)) == 1
    time.sleep(2.2)  # folded and focused it stays, whatever comes from the server
    assert focused(browser).get_attribute("aria-expanded") == "false"
    assert press(Keys.ARROW_RIGHT)["aria-expanded"] == "true"
    assert press(Keys.ARROW_RIGHT)["aria-level"] == "2"
    assert press(Keys.ARROW_UP, Keys.ENTER)["aria-expanded"] == "false"
    assert press("*")["aria-expanded"] == "true"

    pause = browser.find_element(By.ID, "pause")
    pause.send_keys(Keys.ENTER)
    assert text(browser, "#state") == "Paused"
    shown = text(browser, "#updated")
    time.sleep(2.2)
    assert text(browser, "#updated") == shown
    pause.send_keys(Keys.ENTER)
    until(browser, lambda: text(browser, "#state") == "Live")


def test_a_restart_an_outage_and_a_key_are_shown(
    server: ServerProcess, browser: webdriver.Chrome, model: Path, adapters: dict[str, Path]
) -> None:
    """Runs last: it ends the server and starts another one, with a key, in its place."""
    browser.get(f"{server.url}/precache")
    until(browser, lambda: text(browser, "#state") == "Live")
    server.stop()
    until(browser, lambda: text(browser, "#state") == "No answer")
    assert "Figures below are from" in text(browser, "#problem")
    args = [*ARGS, "--api-key", "sesame"]
    with ServerProcess(model, adapters, args, port=server.port) as second:
        until(browser, lambda: text(browser, "#state") == "Locked", 60)
        assert "asks for a key" in text(browser, "#problem")
        with pytest.raises(ServerError, match="401"):
            second.get("/precache/view")
        field = browser.find_element(By.ID, "key")
        field.send_keys("wrong", Keys.ENTER)
        until(browser, lambda: "does not accept this key" in text(browser, "#problem"))
        field.send_keys("sesame", Keys.ENTER)
        until(browser, lambda: text(browser, "#state") == "Live")
        assert not browser.find_element(By.ID, "problem").is_displayed()
        assert "started again" in text(browser, "#restart")
        browser.refresh()  # the key is kept in the tab
        until(browser, lambda: text(browser, "#state") == "Live")
        assert "sesame" not in browser.page_source

        # The page alone is public, at these two addresses and no other.
        page = second.get("/precache")
        assert "<title>precache</title>" in page and second.get("/precache/") == page
        for path in ("/precache/state", "/precache//", "/v1/models", "/precache/%2e%2e/v1/models"):
            with pytest.raises(ServerError, match="401"):
                second.get(path)
        with urllib.request.urlopen(f"{second.url}/precache", timeout=10) as response:
            policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
