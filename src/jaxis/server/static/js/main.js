// Puts the page together.

import { Api, ApiError } from "./api.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { byId, icon, toast } from "./dom.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";

const THEMES = { auto: "Theme: the system's", light: "Theme: light", dark: "Theme: dark" };
const RETRY_MS = 3000;
const isTouch = matchMedia("(pointer: coarse)").matches;

for (const button of document.querySelectorAll("[data-icon]")) button.append(icon(button.dataset.icon));

const settings = new Settings();
const api = new Api(() => settings.apiKey);
const store = new Store();
const chat = new Chat(api, store, settings, () => byId("model").value);
const sidebar = new Sidebar(store, chat);
const attachments = new Attachments();
const prompt = byId("prompt");
let models = [];
let nextTry = null; // to reach a server that does not answer
let unauthorized = null; // the request to repeat when there is a key

function showNotice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

async function loadModels() {
  try {
    models = await api.listModels();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) {
      askForKey();
    } else {
      showNotice(error.message);
      clearTimeout(nextTry);
      nextTry = setTimeout(loadModels, RETRY_MS);
    }
    return false;
  }
  showNotice("");
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...models.map(({ id }) => new Option(id, id)));
  if (models.some(({ id }) => id === chosen)) select.value = chosen;
  select.disabled = models.length < 2;
  showModel();
  return true;
}

function showModel() {
  const model = models.find(({ id }) => id === byId("model").value);
  settings.showDefaults(model?.default_parameters);
  attachments.areTaken = Boolean(model?.input_modalities?.includes("image"));
  byId("model").title = model?.max_model_len ? `${model.id}, up to ${model.max_model_len.toLocaleString()} tokens` : "";
}

function askForKey() {
  const reason = settings.apiKey ? "The server does not take this API key." : "The server asks for an API key.";
  settings.open(chat.systemPrompt, reason);
}

function showConversation() {
  const { conversation, run } = chat;
  byId("welcome").hidden = Boolean(conversation);
  byId("title").textContent = conversation?.title ?? "New conversation";
  document.title = conversation ? `${conversation.title} · jaxis` : "jaxis";
  const hash = conversation ? `#${conversation.id}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname);
  const send = byId("send");
  send.replaceChildren(icon(run ? "stop" : "send"));
  send.setAttribute("aria-label", run ? "Stop" : "Send");
  send.title = run ? "Stop (Esc)" : "Send (Enter)";
  send.classList.toggle("stop", Boolean(run));
  sidebar.render();
}

function openFromAddress() {
  chat.open(store.get(location.hash.slice(1)) ?? null);
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
}

function submit() {
  if (chat.run) {
    chat.stop();
  } else if (prompt.value.trim() || attachments.urls.length) {
    chat.send(prompt.value.trim(), attachments.take());
    prompt.value = "";
    fitPrompt();
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").replaceChildren(icon(theme));
  byId("theme").title = THEMES[theme];
  byId("theme").setAttribute("aria-label", THEMES[theme]);
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % names.length];
  setTheme(next);
  try {
    if (next === "auto") localStorage.removeItem("jaxis-theme");
    else localStorage.setItem("jaxis-theme", next);
  } catch {
    // no storage: it lasts as long as the page
  }
});

byId("welcome").addEventListener("click", ({ target }) => {
  if (!target.closest("button")) return;
  prompt.value = target.textContent;
  fitPrompt();
  prompt.focus();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  // Where there is no Shift key at hand, Enter breaks the line; while an input method composes, it picks a word.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
  event.preventDefault();
  if (!chat.run) submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || settings.dialog.open) return;
  if (sidebar.isOpen) sidebar.close();
  else chat.stop();
});

byId("model").addEventListener("change", showModel);
byId("open-settings").addEventListener("click", () => settings.open(chat.systemPrompt));
settings.addEventListener("saved", async () => {
  chat.setSystemPrompt(settings.systemPrompt);
  if (!(await loadModels()) || !unauthorized) return;
  const request = unauthorized;
  unauthorized = null;
  chat.retryUnauthorized(request);
});
chat.addEventListener("changed", showConversation);
chat.addEventListener("unauthorized", ({ detail }) => {
  unauthorized = detail;
  askForKey();
});
chat.addEventListener("lost", loadModels);
store.addEventListener("changed", ({ detail: id }) => {
  if (chat.conversation?.id === id) chat.open(store.get(id) ?? null);
  else sidebar.render();
});
store.addEventListener("failed", () => toast("The browser could not store the conversation: its storage may be full."));
addEventListener("popstate", openFromAddress);
addEventListener("pagehide", () => chat.stopAll());

setTheme(document.documentElement.dataset.theme ?? "auto");
if (isTouch) byId("hint").textContent = "";
if (!(await store.open())) toast("This browser stores nothing for this page: conversations end with it.");
openFromAddress();
await loadModels();
