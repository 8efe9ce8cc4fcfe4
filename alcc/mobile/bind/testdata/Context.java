package android.content;

/** Context stands for Android's, which the generated classes name. */
public class Context {
    public Context getApplicationContext() {
        return this;
    }
}
