// Small helpers for building elements. Text always goes in as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Outlines in a box of 24 by 24.
const ICONS = {
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  branch: "M7 4v16M7 14c0-4 10-2 10-7M14 7l3-3 3 3",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  dark: "M20 14A8.5 8.5 0 0 1 10 4a8.5 8.5 0 1 0 10 10z",
  delete: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13M10.5 11v5.5M13.5 11v5.5",
  done: "M5 12.5l4.5 4.5L19 7.5",
  down: "M12 5v14M6 13l6 6 6-6",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  export: "M12 15V4M8 8l4-4 4 4M5 14v6h14v-6",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 8v2",
  light:
    "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  menu: "M4 7h16M4 12h16M4 17h16",
  play: "M8 5l11 7-11 7z",
  retry: "M19.5 12A7.5 7.5 0 1 1 17 6.4M20 3v5h-5",
  send: "M12 19V5M6 11l6-6 6 6",
  settings:
    "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5zM8 14.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z",
  stop: "M7 7h10v10H7z",
};

/** An element with properties (`on...` are listeners, the rest attributes; null and false are left out) and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows only an icon; its name is for screen readers and as a tooltip. */
export function iconButton(name, label, onclick, properties = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...properties },
    icon(name),
  );
}

export function byId(id) {
  return document.getElementById(id);
}

/** Puts the cursor where messages are written; not where that opens a keyboard over half of the page. */
export function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) byId("prompt").focus();
}

/** A note at the bottom for some seconds, with a button if `action` is given: {label, run}. */
export function toast(text, action = null, seconds = 8) {
  const element = h("div", { class: "toast" }, h("span", {}, text));
  const timer = setTimeout(() => element.remove(), seconds * 1000);
  if (action) {
    const run = () => {
      clearTimeout(timer);
      element.remove();
      action.run();
    };
    element.append(h("button", { type: "button", onclick: run }, action.label));
  }
  byId("toasts").replaceChildren(element);
}

/** Puts text on the clipboard; pages that came without TLS from another machine have no clipboard API. */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = h("textarea", { class: "visually-hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A random name; crypto.randomUUID is missing on pages that came without TLS from another machine. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Lets the user save an object as a JSON file. */
export function downloadJson(value, filename) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  h("a", { href: url, download: filename }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
