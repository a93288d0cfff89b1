// A model's Markdown as elements. What a model writes is untrusted: HTML in it is shown as text, pictures are links that
// the page does not load, and what comes out of the parser goes through DOMPurify.

import hljs from "../vendor/highlight.js";
import { Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/purify.js";
import { drawFormulas, formula, formulaExtensions } from "./math.js";

const MAX_HIGHLIGHTED_CHARACTERS = 30_000; // a longer block would hold up the page at every new token
const SANITIZE = {
  ALLOWED_TAGS: [
    "a",
    "blockquote",
    "br",
    "code",
    "del",
    "div",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "li",
    "ol",
    "p",
    "pre",
    "span",
    "strong",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName === "A") {
    element.setAttribute("target", "_blank");
    element.setAttribute("rel", "noopener noreferrer nofollow");
  }
});

function escape(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => names[character]);
}

function highlight(text, language) {
  if (!hljs.getLanguage(language) || text.length > MAX_HIGHLIGHTED_CHARACTERS) return escape(text);
  return hljs.highlight(text, { language, ignoreIllegals: true }).value;
}

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)} (image)</a>`,
    checkbox: ({ checked }) => `<span class="checkbox">${checked ? "☑" : "☐"} </span>`,
    code: ({ text, lang }) => {
      const language = (lang ?? "").match(/^[\w+#.-]*/)[0];
      if (language === "math") return formula(`$$${escape(text)}$$`);
      return (
        `<div class="code-block"><div class="code-head"><span>${escape(language || "text")}</span></div>` +
        `<pre><code>${highlight(text, language)}\n</code></pre></div>`
      );
    },
  },
});
marked.use({ extensions: formulaExtensions(escape) });

/** Shows Markdown that grows. Only the blocks that changed are rendered again: a selection in the others stays. */
export class MarkdownView {
  /** @param {HTMLElement} element to fill */
  constructor(element) {
    this.element = element;
    this.blocks = []; // the source of each child
    this.links = "";
  }

  render(text) {
    const tokens = marked.lexer(text);
    const links = JSON.stringify(tokens.links); // definitions further down, which change what stands above
    if (links !== this.links) this.blocks = [];
    this.links = links;
    const shown = tokens.filter((token) => token.type !== "space" && token.type !== "def");
    let numSame = 0;
    while (numSame < shown.length && this.blocks[numSame] === shown[numSame].raw) numSame++;
    while (this.element.children.length > numSame) this.element.lastChild.remove();
    for (const token of shown.slice(numSame)) this.element.append(renderBlock(token));
    this.blocks = shown.map((token) => token.raw);
  }
}

function renderBlock(token) {
  const block = document.createElement("div");
  block.className = "block";
  block.append(DOMPurify.sanitize(marked.parser([token]), SANITIZE));
  drawFormulas(block);
  for (const head of block.querySelectorAll(".code-head")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy-code";
    button.textContent = "Copy";
    head.append(button);
  }
  for (const table of block.querySelectorAll("table")) {
    const scroller = document.createElement("div");
    scroller.className = "table-scroll";
    table.replaceWith(scroller);
    scroller.append(table);
  }
  return block;
}
