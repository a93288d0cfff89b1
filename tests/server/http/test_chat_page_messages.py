"""The chat page with answers that a small model does not give, and with what users do to conversations."""

import json
import re

import pytest

from tests.server.http.scripted_api import ScriptedApi, answer
from tests.support.quick_rows import quick_rows

NUM_MESSAGES = "document.querySelectorAll('.message').length"
IDLE = "document.getElementById('log').getAttribute('aria-busy') === 'false'"
HOSTILE = """Hello <img src=x onerror="window.pwned = 1"> <script>window.pwned = 1</script>

<script>window.pwned = 2</script>

<iframe srcdoc="<script>parent.pwned = 3</script>"></iframe>

![picture](https://evil.example/pixel.png) [bad](javascript:window.pwned=4) [good](https://good.example/?a=1&b=2)
![x" onerror="window.pwned=5](https://evil.example/a.png "y' onload='window.pwned=6")

```html" onmouseover="window.pwned=7
<script>window.pwned = 8</script>
```

<style>body { display: none }</style> <form action="https://evil.example"><input name="x"></form> | a |

| a |
|---|
| <svg onload="window.pwned=9"> |
"""
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42m"
PIXEL += "Nk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CODE = 'def f(x):\n    return "a" + x  # <b>\n'


@pytest.fixture
def api():
    with ScriptedApi().serving() as api:
        yield api


@pytest.fixture
def page(api, tab):
    load(tab, api.url)
    yield tab
    assert [problem for problem in tab.problems() if "429" not in str(problem)] == []


def load(tab, url):
    tab.goto(url)
    tab.wait_for("document.getElementById('model').value === 'scripted'")


def ask(tab, text):
    tab.type("#prompt", text)
    tab.press("Enter")


def converse(tab, api, *turns):
    """Asks and gets answers, pairs of texts, one after the other."""
    for question, text in turns:
        api.script.append(answer(text))
        count = tab.evaluate(NUM_MESSAGES)
        ask(tab, question)
        tab.wait_for(f"{NUM_MESSAGES} === {count + 2} && {IDLE}")


def contents(tab):
    """The texts of all messages."""
    return tab.evaluate(
        "[...document.querySelectorAll('.message')].map(m => m.querySelector('.plain, .content').innerText.trim())"
    )


def click_action(tab, label, message=-1):
    """Clicks a button of a message."""
    tab.evaluate(
        f"[...document.querySelectorAll('.message')].at({message}).querySelector('[aria-label=\"{label}\"]').click()"
    )


def pick_file(tab, text):
    tab.evaluate(
        f"""(() => {{
          const files = new DataTransfer();
          files.items.add(new File([{json.dumps(text)}], "chats.json", {{type: "application/json"}}));
          const input = document.getElementById("import-file");
          input.files = files.files;
          input.dispatchEvent(new Event("change"));
        }})()"""
    )


def test_markdown_is_shown_and_hostile_markdown_does_nothing(page, api):
    converse(page, api, ("Q", f"# Title\n\nSome *text*.\n\n```python\n{CODE}```\n\n- one\n- two\n\n{HOSTILE}"))
    shown = "document.querySelector('.content')"
    assert page.text(".content h1") == "Title"
    assert page.evaluate(f"{shown}.querySelectorAll('li').length") == 2
    assert page.evaluate(f"{shown}.querySelector('code').textContent.trimEnd()") == CODE.rstrip()
    assert page.evaluate(f"{shown}.querySelector('code .hljs-keyword').textContent") == "def"
    # Its HTML is there to read, and is not HTML.
    assert "<script>window.pwned = 2</script>" in page.text(".content")
    forbidden = "img, script, iframe, style, form, input, svg, object, [onerror], [onload], [onmouseover], [style]"
    assert page.evaluate(f"{shown}.querySelectorAll('{forbidden}').length") == 0
    assert page.evaluate("window.pwned === undefined")
    links = page.evaluate(
        f"[...{shown}.querySelectorAll('a[href]')].map(a => [a.getAttribute('href'), a.rel, a.target])"
    )
    assert ["https://good.example/?a=1&b=2", "noopener noreferrer nofollow", "_blank"] in links
    assert all(href.startswith("https://") for href, _, _ in links)
    assert all(url.startswith((api.url, "about:")) for url, _ in page.requested())
    # As a stored conversation it passes through the same, and what is copied is the code itself.
    page.goto(page.evaluate("location.href"))
    page.wait_for(f"{NUM_MESSAGES} === 2")
    assert page.evaluate("window.pwned === undefined")
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.click(".copy-code")
    assert page.evaluate("window.copied") == CODE.rstrip()


def test_streamed_markdown_equals_the_whole_at_every_cut(page, api):
    text = "# A\n\nb *c* `d`\n\n1. e\n2. f\n\n```js\nlet x = 1;\n```\n\n| g | h |\n|---|---|\n| 1 | 2 |"
    text += "\n\n[i][j]\n\n[j]: https://k.example\n\n- [x] l\n- [ ] $m$\n\n$$\nn\n\\\\\n= o\n$$\np \\(q\\)"
    html = page.evaluate(
        f"""(async () => {{
          const {{MarkdownView}} = await import("/static/js/markdown.js");
          const text = {json.dumps(text)};
          const render = (...parts) => {{
            const view = new MarkdownView(document.createElement("div"));
            for (const part of parts) view.render(part);
            return view.element.innerHTML;
          }};
          const whole = render(text);
          const cuts = Array.from(text, (_, i) => text.slice(0, i + 1));
          const same = cuts.every((cut) => render(cut, text) === whole) && render(...cuts) === whole;
          return same ? whole : null;
        }})()"""
    )
    assert html is not None
    assert 'href="https://k.example"' in html
    assert html.count("<li>") == 4
    assert html.count('class="katex-html"') == 3


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"Mass is $E = mc^2$, not \(p\)", ["E = mc^2", "p"]),
        ("So:\n$$\na\n= b\n- c\n$$\nand\n\\[\nd \\\\\n\n+ e\n\\]\nthen", ["a\n= b\n- c", "d \\\\\n\n+ e"]),
        (r"1. \[f\]", ["f"]),
        ("```math\ng < h\n```", ["g < h"]),
        (r"| $i \le j$ |" + "\n|---|\n| $$k$$ |", [r"i \le j", "k"]),
        (r"$\vec{v}$", [r"\vec{v}"]),
        ("From $5 to $10, or $ x $; `$y$`, \\$z$, $open", []),
        (r"$\unknown{$ and $\href{javascript:alert(1)}{x}$", [r"\href{javascript:alert(1)}{x}"]),
    ],
)
def test_formulas_are_drawn(page, api, text, formulas):
    converse(page, api, ("Q", text))
    annotations = "[...document.querySelectorAll('.content annotation')].map(a => a.textContent.trim())"
    assert page.evaluate(annotations) == formulas
    if "$open" in text or "unknown" in text:  # what is no formula stays as it was written
        assert re.search(r"\$open|\$\\unknown\{\$", page.text(".content"))
    assert page.evaluate("document.querySelectorAll('.content a, .katex-error').length") == 0
    arrows = page.evaluate("[...document.querySelectorAll('.content svg')].map(svg => svg.clientWidth)")
    assert all(1 < width < 20 for width in arrows)
    assert len(arrows) == text.count(r"\vec")


def test_reasoning_and_tool_calls(page, api):
    call = {"index": 0, "id": "call_7", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"ci', 'ty": "Par', 'is"}')]
    thought = [{"delta": {"reasoning_content": piece}} for piece in ("I need ", "the *weather*.")]
    calls = [{"delta": {"tool_calls": [piece]}} for piece in (call, *pieces)]
    api.script.append([*thought, *calls, {"finish_reason": "tool_calls"}])
    ask(page, "Weather?")
    page.wait_for("document.querySelector('.tool-call textarea')")
    assert not page.evaluate("document.querySelector('.reasoning').open")
    assert page.evaluate("document.querySelector('.reasoning em').textContent") == "weather"
    assert page.text(".tool-name") == "Tool call: get_weather"
    assert json.loads(page.text(".tool-call pre")) == {"city": "Paris"}
    api.script.append(answer("Sunny."))
    page.type(".tool-call textarea", "18 degrees")
    page.click(".tool-call form button")
    page.wait_for("document.querySelectorAll('.assistant').length === 2 && " + IDLE)
    _, assistant, result = api.bodies[-1]["messages"]
    assert assistant["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert result == {"role": "tool", "content": "18 degrees", "tool_call_id": "call_7"}
    assert "reasoning_content" not in assistant


def test_a_full_queue_is_waited_for(page, api):
    api.script += [(429, {"Retry-After": "2"}, "the queue is full"), answer("At last.")]
    ask(page, "Q")
    page.wait_for("document.querySelector('.waiting')?.innerText.includes('Next try in 2 s')")
    page.wait_for("document.querySelector('.waiting')?.innerText.includes('Next try in 1 s')")
    page.wait_for(IDLE)
    assert contents(page) == ["Q", "At last."]
    assert len(api.bodies) == 2
    # Waiting can be stopped.
    api.script.append((429, {"Retry-After": "60"}, "the queue is full"))
    ask(page, "Again")
    page.wait_for("document.querySelector('.waiting')")
    page.press("Escape")
    page.wait_for(IDLE)
    assert "Stopped" in page.text(".assistant")


def test_a_broken_stream_keeps_what_came_and_can_go_on(page, api):
    api.script += [[*answer("One two")[:-1], "break"], answer(" three.")]
    ask(page, "Q")
    page.wait_for("document.querySelector('.status .error')")
    assert "connection broke" in page.text(".status .error")
    assert contents(page) == ["Q", "One two"]
    click_action(page, "Continue")
    page.wait_for(IDLE)
    assert contents(page) == ["Q", "One two three."]
    assert api.bodies[-1]["continue_final_message"] is True
    assert api.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "One two"}


def test_editing_and_answering_again_replace_what_follows(page, api):
    converse(page, api, ("A", "1"), ("B", "2"))
    api.script.append(answer("two"))
    click_action(page, "Answer again")
    page.wait_for(f"{IDLE} && {NUM_MESSAGES} === 4")
    assert contents(page) == ["A", "1", "B", "two"]
    click_action(page, "New conversation from here", 1)
    assert contents(page) == ["A", "1"]
    page.evaluate("history.back()")
    page.wait_for(f"{NUM_MESSAGES} === 4")
    api.script.append(answer("one"))
    click_action(page, "Edit", 0)
    page.type(".edit-area", "Z")
    page.click(".edit-buttons .primary")
    page.wait_for(f"{IDLE} && {NUM_MESSAGES} === 2")
    assert contents(page) == ["Z", "one"]
    assert [message["content"] for message in api.bodies[-1]["messages"]] == ["Z"]
    page.click(".toast button")  # undo
    assert contents(page) == ["A", "1", "B", "two"]
    click_action(page, "Edit", 1)
    page.type(".edit-area", "uno")
    page.click(".edit-buttons .primary")
    assert contents(page) == ["A", "uno", "B", "two"]
    converse(page, api, ("C", "3"))
    assert [message["content"] for message in api.bodies[-1]["messages"]] == ["A", "uno", "B", "two", "C"]


def test_conversations_are_renamed_deleted_exported_and_imported(page, api, browser):
    converse(page, api, ("First question", "1"))
    page.click("#new-conversation")
    converse(page, api, ("Second question", "2"))
    assert page.text("#conversations").split("\n") == ["Second question", "First question"]
    page.click("li.current [aria-label^=Rename]")
    page.type("#conversations input", "Not kept")
    page.press("Escape")
    assert page.text("#title") == "Second question"
    page.click("li.current [aria-label^=Rename]")
    page.type("#conversations input", "Named")
    page.press("Enter")
    assert page.text("#title") == "Named"
    page.evaluate("URL.createObjectURL = (blob) => { window.saved = blob.text(); return 'blob:none'; }")
    page.evaluate("HTMLAnchorElement.prototype.click = function () {}")
    page.click("#export-all")
    saved = page.evaluate("window.saved")
    exported = json.loads(saved)["conversations"]
    assert [row["title"] for row in exported] == ["Named", "First question"]
    assert [(m["role"], m["content"]) for m in exported[1]["messages"]] == [
        ("user", "First question"),
        ("assistant", "1"),
    ]
    # Another tab sees the deletion.
    other = browser.new_tab(page.context)
    load(other, api.url)
    other.wait_for("document.querySelectorAll('#conversations li').length === 2")
    page.click("li.current [aria-label^=Delete]")
    other.wait_for("document.querySelectorAll('#conversations li').length === 1")
    assert page.text("#conversations") == "First question"
    page.click(".toast button")  # undo
    assert page.text("#title") == "Named"
    page.click("li.current [aria-label^=Delete]")
    pick_file(page, saved)
    page.wait_for("document.querySelectorAll('#conversations li').length === 3")
    assert contents(page) == ["Second question", "2"]
    for wrong in ("{", "[]", '{"messages": [{"role": "robot"}]}', '{"messages": [{"role": "user", "content": 5}]}'):
        pick_file(page, wrong)
        page.wait_for("document.querySelector('.toast')?.innerText.startsWith('chats.json: ')")
        page.evaluate("document.querySelector('.toast').remove()")
    assert page.evaluate("document.querySelectorAll('#conversations li').length") == 3


def test_another_conversation_can_be_read_meanwhile(page, api):
    converse(page, api, ("First", "1"))
    page.click("#new-conversation")
    api.script.append([*answer("slow ")[:-1], "gate", *answer("answer")])
    ask(page, "Second")
    page.wait_for("document.querySelectorAll('.assistant .content')[0]?.innerText.includes('slow')")
    page.click("#conversations li:nth-child(2) .conversation")
    assert contents(page) == ["First", "1"]
    api.open_gate()
    page.wait_for("!document.querySelector('.running-mark')")
    page.click("#conversations li:nth-child(1) .conversation")
    assert contents(page) == ["Second", "slow answer"]


def test_the_view_follows_only_at_the_end_and_nothing_jumps(page, api):
    lines = "\n\n".join(f"line {i}" for i in range(60))
    page.evaluate(
        """void new PerformanceObserver((list) => {
             for (const entry of list.getEntries()) {
               if (!entry.hadRecentInput) window.shift = (window.shift ?? 0) + entry.value;
             }
           }).observe({type: "layout-shift", buffered: true})"""
    )
    api.script.append([*answer(lines), "gate", *answer(f"\n\n{lines}"), "gate", *answer(f"\n\n{lines}")])
    at_end = "(e => e.scrollHeight - e.scrollTop - e.clientHeight < 5)(document.getElementById('log'))"
    ask(page, "Q")
    page.wait_for(f"document.querySelectorAll('.content p').length === 60 && {at_end}")
    # Again and again, each time elsewhere: on a busy machine, the page may still be about to follow the last line.
    elsewhere = "document.getElementById('log').scrollTop = 90 + Date.now() % 20"
    page.wait_for(f"({elsewhere}) && !document.getElementById('to-end').hidden")
    top = page.evaluate("document.getElementById('log').scrollTop")
    api.open_gate()
    page.wait_for("document.querySelectorAll('.content p').length === 120")
    assert page.evaluate("document.getElementById('log').scrollTop") == top
    page.click("#to-end")
    page.wait_for(at_end)
    api.open_gate()
    page.wait_for(f"document.querySelectorAll('.content p').length === 180 && {at_end} && {IDLE}")
    assert page.evaluate("window.shift ?? 0") < 0.05


def test_dropped_and_pasted_images_are_shown_and_sent(page, api):
    page.evaluate(
        f"""(() => {{
          const bytes = Uint8Array.from(atob({json.dumps(PIXEL.partition(",")[2])}), (letter) => letter.charCodeAt(0));
          const given = new DataTransfer();
          given.items.add(new File([bytes], "a.png", {{type: "image/png"}}));
          const options = {{dataTransfer: given, clipboardData: given, bubbles: true, cancelable: true}};
          document.getElementById("log").dispatchEvent(new DragEvent("drop", options));
          document.getElementById("prompt").dispatchEvent(new ClipboardEvent("paste", options));
        }})()"""
    )
    page.wait_for("document.querySelectorAll('#attachments img').length === 2")
    page.click("#attachments [aria-label='Remove image 2']")
    page.wait_for("document.querySelector('#attachments img').naturalWidth === 1")
    api.script.append(answer("A pixel."))
    ask(page, "What?")
    page.wait_for(IDLE)
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    assert api.bodies[-1]["messages"] == [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
    assert page.evaluate("document.querySelectorAll('#attachments img').length") == 0
    assert page.evaluate("document.querySelector('.user img').src") == PIXEL
    api.script.append(answer("Still a pixel."))
    click_action(page, "Edit", 0)
    page.type(".edit-area", "And now?")
    page.click(".edit-buttons .primary")
    page.wait_for(f"{IDLE} && {NUM_MESSAGES} === 2")
    assert api.bodies[-1]["messages"][0]["content"] == [image, {"type": "text", "text": "And now?"}]


@pytest.mark.parametrize("width", quick_rows([1280, 390], quick=[390]))
def test_it_fits_and_everything_has_a_name(page, api, width):
    page.resize(width, 700, dark=width == 390)
    table = f"|{'several words|' * 6}\n|{'-|' * 6}\n|{'some longer words|' * 6}"
    formula = f"${'a+' * 100}a$ and ${'w' * 100}$\n\n$${'b=' * 100}b$$"
    converse(page, api, ("Q" * 200, f"```\n{'x' * 500}\n```\n\n{table}\n\n{formula}\n\n{'y' * 500}"))
    heights = page.evaluate("[...document.querySelectorAll('td, th')].map(cell => cell.clientHeight)")
    assert max(heights) < 40  # a wide table scrolls: its words stand in one line
    overflow = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(overflow) == 0
    assert page.evaluate("document.getElementById('log').scrollWidth - document.getElementById('log').clientWidth") == 0
    if width == 390:
        page.click("#open-sidebar")
        page.wait_for("document.activeElement.id === 'close-sidebar'")
        page.press("Escape")
        page.wait_for("document.activeElement.id === 'open-sidebar'")
    page.click("#open-settings")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    page.click("#cancel-settings")
    nodes += page.send("Accessibility.getFullAXTree")["nodes"]
    controls = {
        "button",
        "textbox",
        "spinbutton",
        "combobox",
        "checkbox",
        "link",
        "dialog",
        "article",
        "log",
        "navigation",
    }
    named = [node for node in nodes if not node["ignored"] and node["role"]["value"] in controls]
    assert len(named) > 25
    assert [node for node in named if not node.get("name", {}).get("value")] == []
    assert page.evaluate(overflow) == 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 24, 29)" if width == 390 else "rgb(255, 255, 255)")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
    load(page, api.url)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
