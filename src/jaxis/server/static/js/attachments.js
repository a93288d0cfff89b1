// The images that the next message begins with: chosen, dropped or pasted, and shown above the field until it is sent.

import { byId, h, iconButton, toast } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** Small pictures of images, each a data: URL; `onremove` gets the index of one that is taken away. */
export function thumbnails(urls, onremove = null) {
  return urls.map((url, index) =>
    h(
      "li",
      {},
      h("img", { src: url, alt: `Image ${index + 1}` }),
      onremove && iconButton("close", `Remove image ${index + 1}`, () => onremove(index)),
    ),
  );
}

export class Attachments {
  constructor() {
    this.urls = [];
    this.list = byId("attachments");
    this.button = byId("attach");
    this.input = byId("image-files");
    this.input.accept = TYPES.join(",");
    this.button.addEventListener("click", () => this.input.click());
    this.input.addEventListener("change", () => {
      this.add(this.input.files);
      this.input.value = "";
    });
    byId("prompt").addEventListener("paste", (event) => {
      if (event.clipboardData.files.length === 0) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    byId("main").addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    byId("main").addEventListener("drop", (event) => {
      if (event.dataTransfer.files.length === 0) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  /** Whether the chosen model takes images. */
  set areTaken(taken) {
    this.button.hidden = !taken;
  }

  async add(files) {
    if (this.button.hidden) {
      toast("This model takes no images.", null, 4);
      return;
    }
    for (const file of files) {
      if (TYPES.includes(file.type)) this.urls.push(await dataUrl(file));
      else toast(`${file.name} is not a PNG, JPEG, WebP or GIF.`, null, 4);
    }
    this.#show();
  }

  /** The images, which are then gone from here. */
  take() {
    const { urls } = this;
    this.urls = [];
    this.#show();
    return urls;
  }

  #show() {
    this.list.hidden = this.urls.length === 0;
    this.list.replaceChildren(
      ...thumbnails(this.urls, (index) => {
        this.urls.splice(index, 1);
        this.#show();
        byId("prompt").focus();
      }),
    );
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
