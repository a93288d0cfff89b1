// Formulas in a model's Markdown, drawn by KaTeX: $...$ and \(...\) in a line; $$...$$ and \[...\] on lines of their own.

import "../vendor/katex/katex.js"; // a script that defines globalThis.katex

const BLOCK = /^ {0,3}(?:\$\$(?:[^$]|\\\$)+?\$\$|\\\[[^]+?\\\])[ \t]*(?:\n|$)/;
// As in Pandoc, "from $5 to $10" is no formula: one dollar has no space inside, and no digit after it.
const INLINE = /^(?:\$\$[^$]+?\$\$|\\\([^]+?\\\)|\\\[[^]+?\\\]|\$(?![\s$])(?:\\.|[^\\$\n`])*?(?<!\s)\$(?!\d))/;

const { katex } = globalThis;

// KaTeX gives an arrow over a letter its width as a style attribute, which the page's content security policy refuses.
const svgNode = katex.__domTree.SvgNode.prototype;
const toNode = svgNode.toNode;
svgNode.toNode = function () {
  const { style = "", ...attributes } = this.attributes;
  const node = toNode.call({ children: this.children, attributes });
  node.style.cssText = style;
  return node;
};

/** Returns an element's HTML, which drawFormulas draws. `escapedSource` is the formula with its delimiters. */
export function formula(escapedSource) {
  return `<span class="formula">${escapedSource}</span>`;
}

/** Extensions of marked. `escape` makes HTML of text. */
export function formulaExtensions(escape) {
  const renderer = ({ raw }) => formula(escape(raw.trim()));
  const tokenizer = (name, pattern) => (source) => {
    const raw = source.match(pattern)?.[0];
    return raw && { type: name, raw };
  };
  return [
    {
      name: "formulaBlock",
      level: "block",
      start: (source) => source.match(/\n {0,3}(?:\$\$|\\\[)/)?.index,
      tokenizer: tokenizer("formulaBlock", BLOCK),
      renderer,
    },
    {
      name: "formula",
      level: "inline",
      start: (source) => source.match(/\$|\\[([]/)?.index,
      tokenizer: tokenizer("formula", INLINE),
      renderer,
    },
  ];
}

/** Draws the formulas of an element. What KaTeX does not understand stays as the model wrote it. */
export function drawFormulas(element) {
  for (const place of element.querySelectorAll(".formula")) {
    const source = place.textContent;
    const delimiter = source.match(/^(?:\$\$?|\\.)/)[0];
    const tex = source.slice(delimiter.length, -delimiter.length);
    try {
      katex.render(tex, place, { displayMode: /\$\$|\[/.test(delimiter), strict: "ignore" });
    } catch {
      place.textContent = source;
    }
  }
}
