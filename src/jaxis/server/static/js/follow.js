// Keeps the end of a growing element in sight, as long as the user stays there.

const NEAR_PIXELS = 48;

export class Follower {
  /**
   * @param {HTMLElement} scroller the element that scrolls
   * @param {HTMLElement} content what grows in it
   * @param {HTMLElement} button leads to the end; shown when that is out of sight
   */
  constructor(scroller, content, button) {
    Object.assign(this, { scroller, button });
    this.isAtEnd = true;
    this.lastTop = 0;
    scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    button.addEventListener("click", () => this.toEnd());
    const observer = new ResizeObserver(() => this.#follow());
    observer.observe(content);
    observer.observe(scroller);
  }

  toEnd() {
    this.isAtEnd = true;
    this.#follow();
  }

  #noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const left = scrollHeight - scrollTop - clientHeight;
    // Any way up leaves the end; growth alone, which is not noticed before it is followed, does not.
    if (scrollTop < this.lastTop) this.isAtEnd = left <= 1;
    else if (left < NEAR_PIXELS) this.isAtEnd = true;
    this.lastTop = scrollTop;
    this.button.hidden = this.isAtEnd;
  }

  #follow() {
    if (this.isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
    this.button.hidden = this.isAtEnd;
  }
}
