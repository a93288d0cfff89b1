"""`jaxis new-key`: what it prints is a key, and an entry that knows it."""

import yaml

from jaxis.server.http.api_keys import ApiKeys, read_api_keys


def test_entries_can_be_appended_and_the_keys_are_shown_apart(invoke, tmp_path):
    path, texts = tmp_path / "keys.yaml", []
    for arguments in (
        ("alice",),
        ("ci", "--requests-per-minute", 60, "--tokens-per-minute", 9000, "--priority", 1),
        ("root", "--admin"),
    ):
        result = invoke("new-key", *arguments)
        assert result.exit_code == 0
        texts.append(result.stderr.strip())
        with path.open("a") as file:
            file.write(result.stdout)
    assert len(set(texts)) == 3
    assert all(text.startswith("jaxis-") and len(text) > 40 for text in texts)
    keys = ApiKeys((), path)
    assert [keys.find(text).name for text in texts] == ["alice", "ci", "root"]
    alice, ci, root = read_api_keys(path)
    assert (alice.admin, ci.admin, root.admin) == (False, False, True)
    assert (ci.requests_per_minute, ci.tokens_per_minute, ci.priority) == (60, 9000, 1)
    assert set(yaml.safe_load(path.read_text())[0]) == {"name", "sha256"}


def test_a_name_that_logs_could_not_show_is_refused(invoke):
    result = invoke("new-key", "a b")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("jaxis: error: the key's name must be 1 to 64 letters")
