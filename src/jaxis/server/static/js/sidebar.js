// The list of conversations: open, rename, export, delete, import.

import { byId, downloadJson, focusPrompt, h, iconButton, toast } from "./dom.js";
import { exportedConversations, importedConversations } from "./store.js";

/** `chat` opens conversations; `store` has them. */
export class Sidebar {
  constructor(store, chat) {
    this.store = store;
    this.chat = chat;
    this.list = byId("conversations");
    byId("new-conversation").addEventListener("click", () => {
      chat.open(null);
      this.close();
      focusPrompt();
    });
    byId("export-all").addEventListener("click", () => this.#export(store.list(), "conversations"));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.#import(event.target));
    byId("open-sidebar").addEventListener("click", () => this.#open());
    byId("close-sidebar").addEventListener("click", () => this.close());
    byId("backdrop").addEventListener("click", () => this.close());
  }

  get isOpen() {
    return document.body.classList.contains("sidebar-open");
  }

  #open() {
    document.body.classList.add("sidebar-open");
    byId("backdrop").hidden = false;
    byId("main").inert = true;
    byId("close-sidebar").focus();
  }

  /** On small screens, where it covers the page. */
  close() {
    if (!this.isOpen) return;
    document.body.classList.remove("sidebar-open");
    byId("backdrop").hidden = true;
    byId("main").inert = false;
    byId("open-sidebar").focus();
  }

  render() {
    if (this.list.querySelector("input")) return; // a name is being typed
    const rows = this.store.list().map((conversation) => this.#row(conversation));
    this.list.replaceChildren(...rows);
    byId("export-all").disabled = rows.length === 0;
  }

  #row(conversation) {
    const isCurrent = this.chat.conversation?.id === conversation.id;
    const open = h(
      "button",
      {
        type: "button",
        class: "conversation",
        "aria-current": isCurrent ? "page" : null,
        title: conversation.title,
        onclick: () => this.#select(conversation),
      },
      conversation.title,
    );
    const row = h("li", { class: isCurrent ? "current" : "" }, open);
    if (this.chat.runs.has(conversation.id))
      row.append(
        h("span", { class: "running-mark", title: "Answering" }, h("span", { class: "visually-hidden" }, "answering")),
      );
    const about = `: ${conversation.title}`;
    row.append(
      h(
        "span",
        { class: "row-actions" },
        iconButton("edit", `Rename${about}`, () => this.#rename(conversation, row)),
        iconButton("export", `Export${about}`, () => this.#export([conversation], conversation.title)),
        iconButton("delete", `Delete${about}`, () => this.#delete(conversation)),
      ),
    );
    return row;
  }

  #select(conversation) {
    this.chat.open(conversation);
    this.close();
    focusPrompt();
  }

  #rename(conversation, row) {
    const input = h("input", { type: "text", "aria-label": "Name of the conversation", maxlength: 200 });
    input.value = conversation.title;
    let isDone = false;
    const finish = (isKept) => {
      if (isDone) return;
      isDone = true; // before the field goes, which takes the focus from it and calls this once more
      input.remove();
      const title = input.value.trim();
      if (isKept && title) {
        Object.assign(conversation, { title, isNamed: true });
        this.store.put(conversation);
      }
      this.chat.dispatchEvent(new Event("changed"));
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      finish(event.key === "Enter");
    });
    input.addEventListener("blur", () => finish(true));
    row.replaceChildren(input);
    input.select();
  }

  #delete(conversation) {
    this.chat.runs.get(conversation.id)?.controller.abort();
    this.store.delete(conversation.id);
    if (this.chat.conversation?.id === conversation.id) this.chat.open(null);
    this.render();
    const run = () => {
      this.store.put(conversation);
      this.chat.open(conversation);
    };
    toast("The conversation was deleted.", { label: "Undo", run });
  }

  #export(conversations, name) {
    const filename =
      name
        .replace(/[^\p{L}\p{N}]+/gu, "-")
        .replace(/^-|-$/g, "")
        .slice(0, 60) || "conversation";
    downloadJson(exportedConversations(conversations), `${filename}.json`);
  }

  async #import(input) {
    const [file] = input.files;
    input.value = "";
    try {
      const conversations = importedConversations(await file.text());
      for (const conversation of conversations) await this.store.put(conversation);
      this.chat.open(conversations[0]);
      toast(
        conversations.length === 1
          ? "A conversation was imported."
          : `${conversations.length} conversations were imported.`,
      );
    } catch (error) {
      toast(`${file.name}: ${error.message}`);
    }
  }
}
